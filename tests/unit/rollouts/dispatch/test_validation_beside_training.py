# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A validation while trajectories of training hold the processes or servers that its own ones need."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

from nemo_rl_moe.data.continuation import Continuation
from nemo_rl_moe.data.prompts import Prompt, PromptLoader
from nemo_rl_moe.endpoint.chat_requests import RequestRules
from nemo_rl_moe.generation.interface import SamplingParameters
from nemo_rl_moe.rewards.interface import Score
from nemo_rl_moe.rollouts.agents.environment import AgentEnvironment
from nemo_rl_moe.rollouts.agents.requests import RequestSettings
from nemo_rl_moe.rollouts.agents.server import EndpointServer
from nemo_rl_moe.rollouts.agents.worker import AgentProgram
from nemo_rl_moe.rollouts.agents.worker_pool import AgentWorkers
from nemo_rl_moe.rollouts.dispatch.source import SampledGroups
from nemo_rl_moe.rollouts.environment import Session
from nemo_rl_moe.rollouts.loops import LoopThread
from nemo_rl_moe.rollouts.rollout_function import RolloutFunction
from nemo_rl_moe.rollouts.run_environment import RunEnvironment
from nemo_rl_moe.rollouts.runner import RolloutRunner
from nemo_rl_moe.rollouts.supervisor import STOP_GRACE_S, RolloutReports, RolloutsGivenUpError
from nemo_rl_moe.rollouts.trajectory import Trajectory
from tests.support.clocks_and_disks import MovedClock
from tests.support.conversations import ALL
from tests.support.grpo_fakes import SAMPLING, FakeRewardFunction, prompts
from tests.support.scripted_rollouts import ScriptedEngine
from tests.unit.rollouts.dispatch.test_groups_of_a_run import groups_of_step, runner_of, source_of

Found = TypeVar("Found")
LIMIT_S = 120.0
QWEN = ALL["Qwen3, Qwen3-MoE"]
MODEL = "the-policy"
AGENT = AgentProgram("tests.support.agents_of_tests:asks_over_http", (), memory_mb=4000)


class InPlaces:
    """Two turns in one of two places."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(2)

    async def __call__(self, session: Session) -> Trajectory:
        async with session.place(self._places.acquire, lambda taken: self._places.release()):
            await session.generate()
            session.append([7, 8])
            await session.generate()
        return session.finish(Score(1.0, is_correct=True))


@contextmanager
def source_ahead(runner: RolloutRunner, folder: Path, staleness: int = 1, **more: Any) -> Iterator[SampledGroups]:
    """A source whose trajectories of the next steps are in flight."""
    overrides = ("grpo.max_num_epochs=3", f"grpo.rollouts.max_staleness={staleness}")
    with source_of(runner, folder, *overrides, warn=print, **more) as source:
        assert len(groups_of_step(source, 0).trained) == 6
        yield source


def within_the_limit(call: Callable[[], Found]) -> Found:
    """The result of a call that may hang: in a thread, so that the test fails instead."""
    found: list[Found] = []
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert found, "it waits for ever, or has failed"
    return found[0]


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_validation_gets_the_places_that_training_holds(staleness: int, tmp_path: Path) -> None:
    runner = runner_of(ScriptedEngine(token_s=0.005), RolloutFunction(InPlaces(), "here"))
    with source_ahead(runner, tmp_path, staleness) as source:
        for step in range(1, 4):
            found = within_the_limit(lambda: runner.evaluate(prompts(2, "val"), 3, SAMPLING, (1, 1)))
            assert [each.reward for each in found] == [1.0] * 6
            assert {each.sample_id for each in found} == {"val:0", "val:1"}
            # Training goes on with all that it had begun.
            assert len(groups_of_step(source, step).trained) == 6


def test_agents_validate_while_others_train(tmp_path: Path) -> None:
    def questions(count: int, name: str) -> list[Prompt]:
        made = []
        for number in range(count):
            message = {"role": "user", "content": f"{name} {number}?"}
            ids = tuple(QWEN.encode(QWEN.render([message], None)))
            made.append(Prompt(f"{name}:{number}", f"{name} {number}", ids, {}, messages=(message,)))
        return made

    sampling = SamplingParameters(max_new_tokens=20, stop_token_ids=(*QWEN.end_ids, 1))
    log = tmp_path / "agents.log"
    with EndpointServer(MODEL) as server, AgentWorkers(AGENT, 2, log) as agents:
        environment = RunEnvironment(
            AgentEnvironment(
                RequestSettings(RequestRules(MODEL, sampling, is_strict=True), None, 20), server, agents, None
            ),
            FakeRewardFunction(),
            continuation=Continuation(QWEN.tokenizer),
        )
        runner = RolloutRunner(
            ScriptedEngine(token_s=0.01),
            {"": environment},
            QWEN.tokenizer.decode,
            partial(QWEN.tokenizer.encode, add_special_tokens=False),
            4000,
            LoopThread(),
        )
        rounds = PromptLoader(questions(7, "train"), 2, seed=3, shuffle=True)
        with source_ahead(runner, tmp_path, sampling=sampling, rounds=rounds):
            found = within_the_limit(lambda: runner.evaluate(questions(2, "val"), 2, sampling, (1, 1)))
            assert [(each.reward, each.fault_message) for each in found] == [(1.0, "")] * 4


def test_who_holds_a_place_for_ever_is_named_and_given_up_when_the_run_is_stopped(tmp_path: Path) -> None:
    """The clock jumps to where the request to stop has been waited for long enough."""
    clock, is_asked, warned, hangs = MovedClock(), threading.Event(), list[str](), threading.Event()
    reports = RolloutReports(lambda: "SIGTERM" if is_asked.is_set() else None, warn=warned.append)

    class Hanging(InPlaces):
        async def __call__(self, session: Session) -> Trajectory:
            async with session.place(self._places.acquire, lambda taken: self._places.release()):
                await session.generate()
                if hangs.is_set():
                    waiting.set()
                    await forever()
            return session.finish(Score(1.0, is_correct=True))

    async def forever() -> None:
        while True:
            await asyncio.sleep(0.01)
            if is_asked.is_set():
                clock.move(STOP_GRACE_S)

    waiting = threading.Event()
    runner = runner_of(ScriptedEngine(token_s=0.002), RolloutFunction(Hanging(), "here"), reports, clock)

    def validate() -> object:
        with pytest.raises(RolloutsGivenUpError):
            runner.evaluate(prompts(2, "val"), 3, SAMPLING, (1, 1))
        return True

    with source_ahead(runner, tmp_path):
        hangs.set()
        assert waiting.wait(LIMIT_S)
        is_asked.set()
        within_the_limit(validate)
    assert "no trajectory has made progress" in warned[0]
