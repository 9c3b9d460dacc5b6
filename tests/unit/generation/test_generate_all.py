# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Requests outside of an event loop, all or a chunk at a time: each is answered once, under its own number."""

import asyncio
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from nemo_rl_moe.data.prompts import Prompt
from nemo_rl_moe.errors import GenerationError
from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationEngine, GenerationRequest, SamplingParameters
from nemo_rl_moe.generation.lockstep import LockstepEngine
from nemo_rl_moe.launch.generate import OneResponse, record_of, responses
from nemo_rl_moe.rewards.interface import NoReward
from nemo_rl_moe.rollouts.environment import Session
from nemo_rl_moe.rollouts.runner import RolloutRunner
from nemo_rl_moe.rollouts.trajectory import Trajectory
from tests.support.grpo_fakes import make_runner
from tests.support.scripted_rollouts import generate_all

SAMPLING = SamplingParameters(max_new_tokens=4, stop_token_ids=(1,))


class Backwards(LockstepEngine):
    """An engine that answers the last request first, with the request's own tokens."""

    def __init__(self) -> None:
        super().__init__(self.backwards)
        self.calls: list[int] = []

    def backwards(self, requests: Sequence[GenerationRequest]) -> Iterator[tuple[int, GeneratedSequence]]:
        self.calls.append(len(requests))
        for index in reversed(range(len(requests))):
            tokens = np.array([*requests[index].token_ids, 1])
            yield index, GeneratedSequence(tokens, np.full(len(tokens), -0.5, np.float32), False, 0)


def request(token: int) -> GenerationRequest:
    return GenerationRequest((token,), seed=token, sampling=SAMPLING)


@pytest.mark.parametrize(
    ("most", "calls"), [(None, [5]), (2, [2, 2, 1]), (5, [5]), (9, [5])], ids=["all", "2", "5", "9"]
)
def test_every_request_is_answered_under_its_number(most: int | None, calls: list[int]) -> None:
    engine = Backwards()
    engine.most_at_a_time = most
    answers = dict(generate_all(engine, [request(token) for token in range(5)]))
    assert {index: sequence.token_ids[0] for index, sequence in answers.items()} == {index: index for index in range(5)}
    assert engine.calls == calls


def test_no_requests() -> None:
    assert list(generate_all(Backwards(), [])) == []


class OneByOne(GenerationEngine):
    """An engine that takes requests as they come, and is done with the last one first; it cannot count to 13."""

    def __init__(self, number: int):
        self._turns = [asyncio.Event() for _ in range(number)]
        self._turns[-1].set()

    async def generate(self, asked: GenerationRequest) -> GeneratedSequence:
        if asked.seed == 13:
            raise RuntimeError("an unlucky number")
        await self._turns[asked.seed].wait()
        if asked.seed:
            asyncio.get_running_loop().call_later(0.01, self._turns[asked.seed - 1].set)
        return GeneratedSequence(np.array(asked.token_ids), np.zeros(1, np.float32), False, 0)


def test_an_engine_that_takes_requests_as_they_come_answers_as_it_is_ready() -> None:
    found = list(generate_all(OneByOne(5), [request(token) for token in range(5)]))
    assert [index for index, _ in found] == [4, 3, 2, 1, 0]
    assert [int(sequence.token_ids[0]) for _, sequence in found] == [4, 3, 2, 1, 0]


def test_an_error_of_one_request_ends_all() -> None:
    with pytest.raises(RuntimeError, match="unlucky"):
        list(generate_all(OneByOne(5), [request(token) for token in (1, 2, 13)]))


def runner_over(engine: LockstepEngine) -> RolloutRunner:
    return make_runner(engine, NoReward(), OneResponse())


def test_responses_come_in_the_order_of_the_prompts() -> None:
    prompts = [Prompt(f"p:{line}", "?", (line,), {}) for line in (10, 20, 30)]
    engine, noted = Backwards(), list[GeneratedSequence]()
    found = list(responses(runner_over(engine), prompts, 2, SAMPLING, 3, 2, noted.append))
    assert len(noted) == 6
    assert [(prompt.sample_id, n) for prompt, n, _ in found] == [
        (f"p:{line}", n) for line in (10, 20, 30) for n in (0, 1)
    ]
    assert [int(each.sequences[0].token_ids[1]) for _, _, each in found] == [10, 10, 20, 20, 30, 30]
    assert engine.calls == [4, 2]


def test_a_failure_ends_the_responses() -> None:
    class Fails:
        async def rollout(self, session: Session) -> Trajectory:
            raise ValueError("no")

    runner = make_runner(Backwards(), NoReward(), Fails())
    with pytest.raises(GenerationError, match="p:1: ValueError: no"):
        list(responses(runner, [Prompt("p:1", "?", (10,), {})], 1, SAMPLING, 3))


def test_record_of_a_response() -> None:
    prompt = Prompt("p.txt:1", "7+8=", (2,), {})
    found = [sequence_of([5, 6, 1]), sequence_of([5], is_truncated=True)]
    engine = LockstepEngine(lambda requests: enumerate(found))
    whole, cut = [each for _, _, each in responses(runner_over(engine), [prompt], 2, SAMPLING, 0)]
    assert record_of(prompt, 3, whole, with_logprobs=True) == {
        "sample_id": "p.txt:1",
        "sample": 3,
        "prompt": "7+8=",
        "response": "5 6",  # without the token that ended it, which is among the tokens
        "finish_reason": "stop",
        "num_tokens": 3,
        "token_ids": [5, 6, 1],
        "logprobs": [-0.25, -0.25, -0.25],
    }
    short = record_of(prompt, 0, cut, with_logprobs=False)
    assert (short["finish_reason"], short["response"], "logprobs" in short) == ("length", "5", False)


def sequence_of(token_ids: list[int], *, is_truncated: bool = False) -> GeneratedSequence:
    return GeneratedSequence(np.array(token_ids), np.full(len(token_ids), -0.25, np.float32), is_truncated, 0)
