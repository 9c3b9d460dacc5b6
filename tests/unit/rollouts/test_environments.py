# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Environments of several turns: masks, log-probabilities, seeds and limits of what they make."""

import asyncio
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from nemo_rl_moe.distributed.batch import Axis, Destination
from nemo_rl_moe.distributed.stored_rows import StoredRows
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationRequest
from nemo_rl_moe.rewards.interface import Fault, Score
from nemo_rl_moe.rollouts.environment import Session
from nemo_rl_moe.rollouts.rollout_function import RolloutFunction, load_rollout_function
from nemo_rl_moe.rollouts.training_batch import training_batch
from nemo_rl_moe.rollouts.trajectory import NOT_SAMPLED, Trajectory, rollout_metrics
from tests.support.grpo_fakes import END_TOKEN, SAMPLING, FakeEngine, FakeRewardFunction, make_runner, prompts
from tests.support.grpo_inputs import only_sequence


async def two_turns(session: Session) -> Trajectory:
    """Asks again, with a question made of the first answer."""
    first = await session.generate()
    session.append([90 + first.token_ids[0]])
    second = await session.generate()
    return session.finish(
        Score(float(len(second.token_ids)), is_correct=True), {"env/asked": float(len(session.turns))}
    )


async def asks_twice(session: Session) -> Trajectory:
    await session.generate()
    await session.generate()
    return session.finish(Score(0.0, is_correct=False), {"tries": 2.0})


def run(function, engine=None, num_prompts=2, generations=2, max_tokens=100):  # type: ignore[no-untyped-def]
    worker = make_runner(
        engine or FakeEngine(), FakeRewardFunction(), RolloutFunction(function, "here:function"), max_tokens
    )
    return worker.evaluate(prompts(num_prompts), generations, SAMPLING, (3, 1))


def test_the_second_question_depends_on_the_first_answer() -> None:
    engine = FakeEngine()
    found = run(two_turns, engine)
    first, second = engine.requests
    assert len(first.prompts) == len(second.prompts) == 4, "each turn of all trajectories is one call of the engine"
    for trajectory, asked, asked_again in zip(found, first.prompts, second.prompts, strict=True):
        answer = asked_again[len(asked) : -1]
        assert asked_again[: len(asked)] == asked
        assert asked_again[-1] == 90 + answer[0], "the environment's own token"
        assert only_sequence(trajectory).token_ids.tolist()[: len(asked_again)] == list(asked_again)
        assert trajectory.num_turns == 2
    assert len({90 + prompt[-1] for prompt in second.prompts}) > 1, "answers differ, and so do the questions"


def test_requests_and_scores_are_answered_in_the_order_of_their_trajectories() -> None:
    """Whichever came first, as with tools that take their time: batches in another order round otherwise."""
    arrived = [[asyncio.Event() for _ in range(4)] for _ in ("a request", "a score")]

    async def after_those_behind(number: int, events: Sequence[asyncio.Event]) -> None:
        if number < 3:
            await events[number + 1].wait()
        events[number].set()

    async def last_come_first(session: Session) -> Trajectory:
        number = int(session.prompt.record["answer"])
        await session.generate()
        await after_those_behind(number, arrived[0])
        await session.generate()
        await after_those_behind(number, arrived[1])
        return session.finish(await session.score())

    engine, rewards = FakeEngine(), FakeRewardFunction()
    worker = make_runner(engine, rewards, RolloutFunction(last_come_first, "here:function"), 100)
    worker.evaluate(prompts(4), 1, SAMPLING, (3, 1))
    first, second = engine.requests
    starts = [asked[: len(before)] for asked, before in zip(second.prompts, first.prompts, strict=True)]
    assert starts == list(first.prompts)
    assert [item.sample_id for item in rewards.items] == [prompt.sample_id for prompt in prompts(4)]


def test_only_sampled_tokens_are_trained_on() -> None:
    engine = FakeEngine(weight_version=4)
    for trajectory, asked, asked_again in zip(
        run(two_turns, engine), engine.requests[0].prompts, engine.requests[1].prompts, strict=True
    ):
        sampled = np.ones(trajectory.num_tokens, dtype=bool)
        sampled[: len(asked)] = False
        sampled[len(asked_again) - 1] = False
        assert only_sequence(trajectory).loss_mask.tolist() == sampled.tolist()
        assert (only_sequence(trajectory).weight_versions == np.where(sampled, 4, NOT_SAMPLED)).all()
        assert (only_sequence(trajectory).logprobs == np.where(sampled, -0.25, 0.0)).all()
        assert trajectory.num_sampled_tokens == sampled.sum()
        assert trajectory.metrics == {"env/asked": 2.0}
        batch = training_batch([trajectory], [torch.arange(len(sampled))], 0, leave_out_truncated=False)
        assert batch.token_mask[0].tolist() == sampled.tolist()
        assert batch.columns["advantages"].axis is Axis.TOKEN
        assert batch.columns["advantages"].values[0].tolist() == list(range(len(sampled)))


def test_turns_draw_other_random_numbers_and_the_same_ones_each_time() -> None:
    def seeds() -> list[tuple[int, ...]]:
        engine = FakeEngine()
        run(two_turns, engine)
        return [request.seeds for request in engine.requests]

    first, second = seeds()
    assert len({*first, *second}) == 8
    assert seeds() == [first, second]
    single = FakeEngine()
    make_runner(single, FakeRewardFunction()).evaluate(prompts(2), 2, SAMPLING, (3, 1))
    assert single.requests[0].seeds == first, "the first turn is sampled as the only one of a single turn"


def test_trajectories_of_different_lengths_share_their_calls() -> None:
    async def until_done(session: Session) -> Trajectory:
        while len(session.turns) < 1 + int(session.prompt.sample_id.split(":")[1]):
            await session.generate()
        return session.finish(await session.score())

    engine = FakeEngine()
    found = run(until_done, engine, num_prompts=3, generations=1)
    assert [trajectory.num_turns for trajectory in found] == [1, 2, 3]
    assert [len(request.prompts) for request in engine.requests] == [3, 2, 1]


def test_a_trajectory_ends_at_its_limit() -> None:
    @dataclass
    class LongWinded(FakeEngine):
        limits: list[int] = field(default_factory=list)

        def answers(self, requests: Sequence[GenerationRequest]) -> Iterator[tuple[int, GeneratedSequence]]:
            for index, request in enumerate(requests):
                self.limits.append(request.sampling.max_new_tokens)
                size = request.sampling.max_new_tokens
                yield index, GeneratedSequence(np.full(size, 7), np.zeros(size), True, 0)

    async def as_long_as_possible(session: Session) -> Trajectory:
        while session.has_room:
            await session.generate()
        with pytest.raises(ValueError, match="full, at 10 tokens"):
            await session.generate()
        return session.finish(Score(0.0, is_correct=False))

    engine = LongWinded()
    (found,) = run(as_long_as_possible, engine, num_prompts=1, generations=1, max_tokens=10)
    assert engine.limits == [6, 3], "the prompt has one token, and a response six at most"
    assert found.num_tokens == 10
    assert found.finish_reason == "length"


def test_kept_mass_is_a_metric_over_all_turns() -> None:
    class Cutting(FakeEngine):
        def answers(self, requests: Sequence[GenerationRequest]) -> Iterator[tuple[int, GeneratedSequence]]:
            for index, request in enumerate(requests):
                mass = np.array([0.5, 0.75]) if len(request.token_ids) == 1 else np.array([1.0])
                yield index, GeneratedSequence(np.full(len(mass), 7), np.zeros(len(mass)), False, 0, kept_mass=mass)

    (found,) = run(asks_twice, Cutting(), num_prompts=1, generations=1)
    assert found.metrics == {"tries": 2.0, "sampling_kept_mass": 0.75}
    (plain,) = run(asks_twice, FakeEngine(), num_prompts=1, generations=1)
    assert plain.metrics == {"tries": 2.0}


def test_a_function_that_raises_costs_its_trajectory_alone() -> None:
    async def fails_at_times(session: Session) -> Trajectory:
        await session.generate()
        if session.prompt.sample_id == "train:1":
            raise RuntimeError("no such tool")
        return session.finish(Score(1.0, is_correct=True))

    found = run(fails_at_times, generations=1)
    assert [trajectory.reward for trajectory in found] == [1.0, 0.0]
    assert found[1].fault is Fault.ERROR
    assert re.fullmatch(r"RuntimeError: no such tool \(test_environments\.py:\d+\)", found[1].fault_message)
    assert only_sequence(found[1]).loss_mask.any(), "what was generated is there"


def test_a_tool_that_cancels_its_trajectory_costs_it_alone() -> None:
    async def is_cancelled(session: Session) -> Trajectory:
        await session.generate()
        if session.prompt.sample_id == "train:1":
            raise asyncio.CancelledError("gone")
        return session.finish(Score(1.0, is_correct=True))

    first, second = messages_of(is_cancelled)
    assert first == ""
    assert second.startswith("CancelledError: gone (test_environments.py:")


def test_an_environment_may_wait_for_something_else() -> None:
    async def with_a_tool(session: Session) -> Trajectory:
        await session.generate()
        await asyncio.sleep(0.01 * (1 + int(session.prompt.sample_id[-1])))
        session.append_text("5 6")
        await session.generate()
        return session.finish(await session.score())

    engine = FakeEngine()
    found = run(with_a_tool, engine, num_prompts=3, generations=1)
    assert [len(request.prompts) for request in engine.requests] == [3, 3], "who is done first waits for the others"
    assert all(trajectory.num_turns == 2 for trajectory in found)


def test_answers_arrive_as_they_are_ready() -> None:
    order: list[str] = []

    class Streaming(FakeEngine):
        def answers(self, requests: Sequence[GenerationRequest]) -> Iterator[tuple[int, GeneratedSequence]]:
            for index in reversed(range(len(requests))):
                order.append(f"generated {index}")
                yield index, GeneratedSequence(np.array([5, END_TOKEN]), np.zeros(2), False, 0)

    async def notes(session: Session) -> Trajectory:
        await session.generate()
        order.append(f"went on {session.prompt.sample_id[-1]}")
        return session.finish(Score(0.0, is_correct=False))

    run(notes, Streaming(), generations=1)
    assert order == ["generated 1", "went on 1", "generated 0", "went on 0"]


def test_an_error_of_the_engine_ends_the_run_with_itself() -> None:
    class Broken(FakeEngine):
        def answers(self, requests: Sequence[GenerationRequest]) -> Iterator[tuple[int, GeneratedSequence]]:
            raise RuntimeError("the engine is gone")

    with pytest.raises(RuntimeError, match="the engine is gone"):
        run(two_turns, Broken())


def test_routes_stay_those_with_which_tokens_were_sampled() -> None:
    """A second request adds those of later tokens; the last token, which was never an input, has none."""

    class Routed(FakeEngine):
        num_requests = 0

        def _respond_to(self, request: GenerationRequest) -> GeneratedSequence:
            fed = len(request.token_ids) + 1
            self.num_requests += 1
            routes = 100 * self.num_requests + np.arange(fed, dtype=np.int16).reshape(fed, 1, 1)
            return GeneratedSequence(np.array([5, END_TOKEN]), np.zeros(2), False, 0, StoredRows.of(routes))

        def answers(self, requests: Sequence[GenerationRequest]) -> Iterator[tuple[int, GeneratedSequence]]:
            yield from enumerate(map(self._respond_to, requests))

    async def with_a_token_between(session: Session) -> Trajectory:
        await session.generate()
        session.append([42])
        await session.generate()
        return session.finish(Score(0.0, is_correct=False))

    (found,) = run(with_a_token_between, Routed(), num_prompts=1, generations=1)
    size = found.num_tokens
    batch = training_batch([found], torch.zeros(1, 1), 0, leave_out_truncated=False).fetched(list)
    routes = batch.columns["routed_experts"]
    assert routes.values.dtype == torch.int16
    assert routes.goes_to is Destination.MODEL
    prompt = size - 5  # two responses of two tokens, and one token between them
    first = [100 + place for place in range(prompt + 1)]
    assert routes.values[0, :, 0, 0].tolist() == first + [200 + place for place in range(prompt + 1, size - 1)] + [-1]


async def named_in_a_configuration(session: Session) -> Trajectory:
    """A function for `env.driver.function`."""
    return await two_turns(session)


def no_coroutine(session: Session) -> None:
    """Not a function for `env.driver.function`."""


def test_the_configuration_names_the_function() -> None:
    here = "tests.unit.rollouts.test_environments"
    assert isinstance(load_rollout_function(f"{here}:named_in_a_configuration"), RolloutFunction)
    with pytest.raises(ConfigurationError, match=r"env\.driver\.function: .*expected a coroutine function"):
        load_rollout_function(f"{here}:no_coroutine")
    with pytest.raises(ConfigurationError, match=r"env\.driver\.function: .*did you mean named_in_a_configuration"):
        load_rollout_function(f"{here}:named_in_a_configuratio")


def test_a_rollout_may_give_rewards_by_name() -> None:
    async def named(session: Session) -> Trajectory:
        await session.generate()
        right = session.prompt.record["answer"] == "0"
        rewards = {"accuracy": 1.0, "format": 0.5} if right else {"acuracy": 1.0, "format": 0.5}
        return session.finish(Score.named(rewards, is_correct=right))

    weights = {"accuracy": 2.0, "format": 1.0}
    worker = make_runner(
        FakeEngine(), FakeRewardFunction(), RolloutFunction(named, "here:named"), reward_weights=weights
    )
    first, second = worker.evaluate(prompts(2), 1, SAMPLING, (3, 1))
    assert (first.reward, first.rewards, first.is_correct) == (2.5, {"accuracy": 1.0, "format": 0.5}, True)
    assert (second.reward, second.rewards, second.fault) == (0.0, {}, Fault.ERROR)
    assert second.fault_message.endswith("did you mean accuracy?")


def messages_of(function, **changes):  # type: ignore[no-untyped-def]
    return [trajectory.fault_message for trajectory in run(function, generations=1, **changes)]


@pytest.mark.parametrize(
    ("returned", "got"),
    [(None, "None"), (1.0, "an object of type float"), (Score(1.0, True), "an object of type Score")],
)
def test_what_a_function_must_return_is_reported(returned: object, got: str) -> None:
    async def forgets(session: Session) -> object:
        await session.generate()
        return session.finish(Score(1.0, is_correct=True)) if session.prompt.sample_id == "train:0" else returned

    assert messages_of(forgets) == [
        "",
        f"TypeError: env.driver.function: here:function returned {got}, expected the Trajectory that"
        " session.finish(score) of its own session makes",
    ]


def test_a_trajectory_of_another_session_is_refused() -> None:
    made: list[Trajectory] = []

    async def returns_the_first(session: Session) -> Trajectory:
        await session.generate()
        made.append(session.finish(Score(1.0, is_correct=True)))
        return made[0]

    first, second = messages_of(returns_the_first)
    assert first == ""
    assert second.startswith(
        "ValueError: env.driver.function: here:function returned a trajectory of train:0#0 for train:1#1,"
    )


def test_a_second_request_while_one_is_waited_for_is_an_error_of_that_trajectory() -> None:
    async def asks_at_once(session: Session) -> Trajectory:
        await session.generate()
        if session.prompt.sample_id == "train:1":
            await asyncio.gather(session.generate(), session.generate())
        await session.generate()
        return session.finish(Score(1.0, is_correct=True))

    first, second = messages_of(asks_at_once)
    assert first == ""
    assert second.startswith(
        "RuntimeError: a response was asked for while a response was still waited for; a session does one thing at a"
        " time: await each before the next (test_environments.py:"
    )


@pytest.mark.parametrize("odd", [[1.0, 2.0], np.array([1.0]), torch.ones(2), "much", None])
def test_a_metric_that_is_no_number_is_an_error_of_its_trajectory(odd: object) -> None:
    """A mean over all values of all lists would pass for the metric."""

    async def measures(session: Session) -> Trajectory:
        await session.generate()
        value: Any = odd if session.prompt.sample_id == "train:1" else torch.tensor(3)
        return session.finish(Score(1.0, is_correct=True), {"depth": value})

    first, second = run(measures, generations=1)
    assert (first.fault_message, first.metrics) == ("", {"depth": 3.0})
    assert second.fault_message.startswith("TypeError: session.finish: the metric 'depth' is ")
    assert second.metrics == {}
    assert re.search(r", expected a number \(test_environments\.py:\d+\)$", second.fault_message)


def test_tokens_added_while_a_response_is_waited_for_are_an_error_too() -> None:
    async def adds_meanwhile(session: Session) -> Trajectory:
        response = asyncio.ensure_future(session.generate())
        await asyncio.sleep(0)
        session.append([7])
        await response
        return session.finish(Score(1.0, is_correct=True))

    assert all(
        "tokens were added while a response was still waited for" in text for text in messages_of(adds_meanwhile)
    )


def test_a_score_needs_a_response() -> None:
    async def scores_first(session: Session) -> Trajectory:
        return session.finish(await session.score())

    assert all("a score was asked for before the first response" in text for text in messages_of(scores_first))


def test_a_function_may_give_up_waiting_for_a_response() -> None:
    async def in_no_hurry(session: Session) -> Trajectory:
        response = asyncio.ensure_future(session.generate())
        await asyncio.sleep(0)
        response.cancel()
        await asyncio.wait([response])
        await session.generate()
        return session.finish(Score(1.0, is_correct=True))

    engine = FakeEngine()
    assert messages_of(in_no_hurry, engine=engine) == ["", ""]
    assert [len(request.prompts) for request in engine.requests] == [2], "what nobody waits for is not generated"


def test_an_answer_that_does_not_fit_ends_the_trajectory() -> None:
    async def long_answer(session: Session) -> Trajectory:
        await session.generate()
        before = session.num_tokens
        session.append([7] * (10_000 if session.prompt.sample_id == "train:1" else session.room))
        assert (session.has_room, session.room) == (False, 0)
        if session.prompt.sample_id == "train:1":
            assert session.num_tokens == before, "nothing of it is trained behind"
            with pytest.raises(ValueError, match="the trajectory is full, 10,000 tokens of the environment"):
                await session.generate()
            session.append([7])
        return session.finish(await session.score())

    fits, cut = run(long_answer, generations=1, max_tokens=80)
    assert (fits.num_tokens, fits.overlong, fits.finish_reason) == (80, "", "stop")
    assert cut.overlong == (
        f"10,000 tokens of the environment do not fit behind {cut.num_tokens} of at most 80"
        " (policy.max_total_sequence_length)"
    )
    assert (cut.finish_reason, cut.fault) == ("length", None), "it is scored"
    assert rollout_metrics([fits, cut])["env/num_overlong"] == 1.0
    assert "env/num_overlong" not in rollout_metrics([fits])


def test_a_text_that_is_far_too_long_is_not_tokenized() -> None:
    def encode(text: str) -> list[int]:
        raise AssertionError(f"{len(text)} characters would take gigabytes")

    async def long_answer(session: Session) -> Trajectory:
        await session.generate()
        session.encode = encode
        session.append_text("x" * 64 * 81 + "y")
        assert (session.has_room, session.room) == (False, 0)
        return session.finish(await session.score())

    (cut,) = run(long_answer, num_prompts=1, generations=1, max_tokens=80)
    assert cut.overlong == (
        "5,185 characters of the environment do not fit into a sequence of at most 80 tokens"
        " (policy.max_total_sequence_length)"
    )
    assert (cut.finish_reason, cut.fault) == ("length", None)


@pytest.mark.parametrize("last_row", [[], [-1], [77]])
def test_a_row_for_the_last_token_means_nothing(last_row: list[int]) -> None:
    """No pass has seen that token: of the next response's routes those of it count."""

    class Routed(FakeEngine):
        def answers(self, requests: Sequence[GenerationRequest]) -> Iterator[tuple[int, GeneratedSequence]]:
            for index, request in enumerate(requests):
                fed = len(request.token_ids) + 1
                routes = np.array([*range(fed), *last_row], dtype=np.int16).reshape(-1, 1, 1)
                yield index, GeneratedSequence(np.array([5, END_TOKEN]), np.zeros(2), False, 0, StoredRows.of(routes))

    (found,) = run(asks_twice, Routed(), num_prompts=1, generations=1)
    batch = training_batch([found], torch.zeros(1, 1), 0, leave_out_truncated=False).fetched(list)
    size = found.num_tokens
    assert batch.columns["routed_experts"].values[0, :, 0, 0].tolist() == [*range(size - 1), -1]
