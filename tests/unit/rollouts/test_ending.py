# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What trajectories send can be wrong in any way: an exception costs its trajectory, and texts never hold the loop."""

import asyncio
import json
from collections.abc import Callable

import pytest

from nemo_rl_moe.data.continuation import Continuation
from nemo_rl_moe.data.control_tokens import too_many_tokens
from nemo_rl_moe.errors import ConfigurationError, GenerationError, WorkerDiedError
from nemo_rl_moe.rewards.interface import Fault, checked_score
from nemo_rl_moe.rewards.user_callable import as_score
from nemo_rl_moe.rollouts.agents.task import AgentTask
from nemo_rl_moe.rollouts.environment import Session
from nemo_rl_moe.rollouts.rollout_function import RolloutFunction
from nemo_rl_moe.rollouts.trajectory import Trajectory
from tests.support.conversations import ALL, MODEL, QUESTION, client_of, ended, error_of, play, scripted_session
from tests.support.grpo_fakes import SAMPLING, FakeEngine, FakeRewardFunction, make_runner, prompts

QWEN = ALL["Qwen3, Qwen3-MoE"]


def recursion() -> None:
    recursion()


def too_large() -> None:
    float(10**400)


def not_encodable() -> None:
    "\ud83d".encode()


class Driver:
    """An environment of this project's, in which something goes wrong with every second trajectory."""

    def __init__(self, fail: Callable[[], object]):
        self._fail, self._number = fail, 0

    async def rollout(self, session: Session) -> Trajectory:
        self._number += 1
        number = self._number
        await session.generate()
        if number % 2 == 0:
            self._fail()
        return session.finish(await session.score())


def trajectories_of(fail: Callable[[], object]) -> list[Trajectory]:
    worker = make_runner(FakeEngine(), FakeRewardFunction(), Driver(fail))
    return worker.evaluate(prompts(2), 2, SAMPLING, (3, 1))


@pytest.mark.parametrize(
    ("fail", "message"),
    [
        (recursion, "RecursionError: maximum recursion depth exceeded"),
        (too_large, "OverflowError: int too large to convert to float"),
        (not_encodable, "UnicodeEncodeError: 'utf-8' codec can't encode character '\\ud83d'"),
        (lambda: json.loads("{"), "JSONDecodeError: "),
    ],
)
def test_any_exception_costs_its_trajectory_alone(fail: Callable[[], object], message: str) -> None:
    found = trajectories_of(fail)
    assert [each.fault for each in found] == [None, Fault.ERROR] * 2
    assert all(each.fault_message.startswith(message) for each in found[1::2])
    assert [each.num_turns for each in found] == [1] * 4, "what was generated stays"


def raising(error: BaseException) -> Callable[[], object]:
    def fail() -> None:
        raise error

    return fail


class Panic(BaseException):
    """As libraries in Rust raise it."""


@pytest.mark.parametrize("error", [Panic("x"), SystemExit(0), BaseExceptionGroup("x", [Panic("y")])])
def test_errors_that_are_no_exceptions_cost_their_trajectory_too(error: BaseException) -> None:
    assert [each.fault for each in trajectories_of(raising(error))] == [None, Fault.ERROR] * 2


@pytest.mark.parametrize("error", [ConfigurationError("x"), WorkerDiedError("x"), GenerationError("x")])
def test_what_is_no_fault_of_a_trajectory_ends_the_run(error: Exception) -> None:
    with pytest.raises(type(error)):
        trajectories_of(raising(error))


def test_a_function_of_a_user_s_own_that_fails_with_wrong_metrics_has_its_fault() -> None:
    async def wrong(session: Session) -> Trajectory:
        session.metrics |= {"mine/text": "high", "mine/number": 2.0}  # type: ignore[dict-item]
        await session.generate()
        raise ValueError("no")

    worker = make_runner(FakeEngine(), FakeRewardFunction(), RolloutFunction(wrong, "here:wrong"))
    (found,) = worker.evaluate(prompts(1), 1, SAMPLING, (3, 1))
    assert (found.fault, found.metrics) == (Fault.ERROR, {"mine/number": 2.0})
    assert found.fault_message.startswith("ValueError: no (test_ending.py:")


@pytest.mark.parametrize("result", [10**400, -(10**400), {"a": 10**400}, (10**400, True)])
def test_a_number_that_is_too_large_for_any_is_a_wrong_reward(result: object) -> None:
    weights = {"a": 1.0} if isinstance(result, dict) else None
    found = checked_score(as_score("env.driver.program", result), weights)
    assert found.fault is Fault.ERROR
    assert "inf, expected a number from -1,000,000 to 1,000,000" in found.message


def test_a_body_that_is_nested_deep_is_refused_and_the_agent_goes_on() -> None:
    errors = []

    def agent(task: AgentTask) -> float:
        nested: object = "x"
        for _ in range(900):
            nested = [nested]
        client = client_of(task)
        more = {"messages": [{**QUESTION, "extra": nested}]}
        errors.append(
            error_of(lambda: client.chat.completions.create(model=MODEL, messages=[QUESTION], extra_body=more))  # type: ignore[list-item]
        )
        client.chat.completions.create(model=MODEL, messages=list(task.messages))  # type: ignore[arg-type]
        return 1.0

    _, found = play(agent, [ended(QWEN, "yes")], QWEN)
    assert errors == [(400, "the body is nested deeper than 100 lists and objects", None)]
    assert (found.reward, found.fault) == (1.0, None)


class Counted:
    """Encodes, and counts the letters that it is given."""

    def __init__(self) -> None:
        self.letters = 0

    def __call__(self, text: str) -> list[int]:
        self.letters += len(text)
        return QWEN.encode(text)


def test_of_a_text_with_more_tokens_than_fit_no_more_is_tokenized_than_shows_it() -> None:
    encode = Counted()
    found = too_many_tokens("word " * 2_000_000, 900, encode)
    assert found is not None
    assert len(found) > 900
    assert encode.letters <= 8 * 1000
    # What is long and fits, as blanks may, is tokenized in pieces, and then as any other.
    assert too_many_tokens(" " * 20_000, 2_000, lambda blanks: [1] * -(-len(blanks) // 100)) is None
    assert too_many_tokens("word " * 1_000, 900, encode) is None, "it is short: who tokenizes it sees that"


@pytest.mark.parametrize("kind", ["text", "message"])
def test_a_long_text_of_an_environment_ends_its_trajectory_as_too_long(kind: str) -> None:
    text = "word " * 200_000

    async def answers(session: Session) -> Trajectory:
        await session.generate()
        if kind == "text":
            session.append_text(text)
        else:
            session.append_message({"role": "user", "content": text})
        assert not session.has_room
        return session.finish(await session.score())

    encode = Counted()
    continuation = Continuation(QWEN.tokenizer, most_tokens=500)
    session = scripted_session(
        QWEN, [QUESTION], [ended(QWEN, "yes")], max_tokens=500, reward=0.5, continuation=continuation
    )
    session.encode = encode
    found = asyncio.run(answers(session))
    assert (found.reward, found.finish_reason) == (0.5, "length")
    assert "do not fit" in found.overlong
    assert encode.letters <= 8 * 1000
