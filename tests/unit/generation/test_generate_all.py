# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Requests outside of an event loop, all or a chunk at a time: each is answered once, under its own number."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from nemo_rl_moe.data.prompts import Prompt
from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationRequest, SamplingParameters
from nemo_rl_moe.generation.lockstep import LockstepEngine, generate_all
from nemo_rl_moe.launch.generate import record_of, responses

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


class OneByOne:
    """An engine that takes requests as they come, and is done with the last one first; it cannot count to 13."""

    shares_weights = False

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

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None


def test_an_engine_that_takes_requests_as_they_come_answers_as_it_is_ready() -> None:
    found = list(generate_all(OneByOne(5), [request(token) for token in range(5)]))
    assert [index for index, _ in found] == [4, 3, 2, 1, 0]
    assert [int(sequence.token_ids[0]) for _, sequence in found] == [4, 3, 2, 1, 0]


def test_an_error_of_one_request_ends_all() -> None:
    with pytest.raises(RuntimeError, match="unlucky"):
        list(generate_all(OneByOne(5), [request(token) for token in (1, 2, 13)]))


def test_responses_come_in_the_order_of_the_prompts() -> None:
    prompts = [Prompt(f"p:{line}", "?", (line,), {}) for line in (10, 20, 30)]
    reported: list[int] = []
    found = [
        (prompt.sample_id, sample, sequence)
        for prompt, sample, sequence in responses(
            Backwards(), prompts, 2, SAMPLING, seed=3, chunk=4, report_progress=reported.append
        )
    ]
    assert reported == [1, 2, 3, 4, 5, 6]
    assert [(name, sample) for name, sample, _ in found] == [(f"p:{line}", n) for line in (10, 20, 30) for n in (0, 1)]
    assert [int(sequence.token_ids[0]) for _, _, sequence in found] == [10, 10, 20, 20, 30, 30]


def test_record_of_a_response() -> None:
    sequence = GeneratedSequence(np.array([5, 6, 1]), np.array([-0.25, -0.5, -1.0], np.float32), False, 0)
    prompt = Prompt("p.txt:1", "7+8=", (2,), {})

    def decode(ids: Sequence[int]) -> str:
        return "-".join(map(str, ids))

    record = record_of(prompt, 3, sequence, SAMPLING, decode, with_logprobs=True)
    assert record == {
        "sample_id": "p.txt:1",
        "sample": 3,
        "prompt": "7+8=",
        "response": "5-6",  # without the token that ended it, which is among the tokens
        "finish_reason": "stop",
        "num_tokens": 3,
        "token_ids": [5, 6, 1],
        "logprobs": [-0.25, -0.5, -1.0],
    }
    cut = GeneratedSequence(np.array([5]), np.array([-0.25], np.float32), True, 0)
    short = record_of(prompt, 0, cut, SAMPLING, decode, with_logprobs=False)
    assert (short["finish_reason"], short["response"], "logprobs" in short) == ("length", "5", False)
