# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A process for users' code of rollouts: what it makes, and what its faults cost."""

import asyncio
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from nemo_rl_moe.distributed.stored_rows import StoredRows
from nemo_rl_moe.errors import ConfigurationError, WorkerDiedError
from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationRequest
from nemo_rl_moe.rewards.interface import Fault
from nemo_rl_moe.rollouts.loops import CallersLoop, LoopThread
from nemo_rl_moe.rollouts.process import client, connection
from nemo_rl_moe.rollouts.process.client import RemoteEnvironment
from nemo_rl_moe.rollouts.process.serve import ProcessSettings
from nemo_rl_moe.rollouts.runner import RolloutRunner
from nemo_rl_moe.rollouts.trajectory import Trajectory
from tests.support import custom_parts
from tests.support.custom_parts import NumbersTokenizer
from tests.support.grpo_fakes import SAMPLING, FakeEngine, FakeRewardFunction, make_runner, prompts
from tests.support.grpo_inputs import assert_same_trajectories
from tests.support.scripted_rollouts import ScriptedEngine

NAME = "env.driver.function: tests:rollout"


def settings_of(start: Any) -> ProcessSettings:
    return ProcessSettings(start, NumbersTokenizer(), None, 100, None, None, None)  # type: ignore[arg-type]


class Hosted:
    """A run's runner over a process, with what the user has heard."""

    def __init__(self, function: str, engine: Any, **changes: Any):
        self.heard: list[str] = []
        self.printed: list[str] = []
        settings = settings_of(partial(custom_parts.start, function))
        self.environment = RemoteEnvironment(replace(settings, **changes), NAME, self.printed.append, self.heard.append)
        loop = CallersLoop() if engine.shares_weights else LoopThread()
        self.runner: RolloutRunner = make_runner(engine, FakeRewardFunction(), self.environment, loop=loop)

    def make(self, number: int = 3, seed: int = 1) -> list[Trajectory]:
        return self.runner.evaluate(prompts(number), 1, SAMPLING, (3, seed))

    def cancel_a_group(self, seeds: Sequence[int], after_s: float) -> None:
        async def begin_and_cancel() -> None:
            group = asyncio.ensure_future(self.runner.make_group(prompts(1)[0], "g", seeds, SAMPLING))
            await asyncio.sleep(after_s)
            group.cancel()
            await asyncio.wait([group])

        self.runner.run(begin_and_cancel())

    def process_of(self, found: list[Trajectory]) -> set[float]:
        return {each.metrics["process"] for each in found if "process" in each.metrics}


@contextmanager
def hosted(function: str, engine: Any = None, **changes: Any) -> Iterator[Hosted]:
    found = Hosted(function, engine or FakeEngine(), **changes)
    try:
        found.environment.wait_for_start()
        yield found
    finally:
        found.runner.close()
        found.environment.stop()


def without_process(found: list[Trajectory]) -> list[Trajectory]:
    return [
        replace(each, metrics={name: value for name, value in each.metrics.items() if name != "process"})
        for each in found
    ]


@pytest.mark.parametrize(
    ("function", "make_engine"),
    [
        pytest.param("two_turns", FakeEngine, marks=pytest.mark.full),
        ("two_turns", ScriptedEngine),
        ("in_place", FakeEngine),
        pytest.param("in_place", ScriptedEngine, marks=pytest.mark.full),
    ],
)
def test_trajectories_are_those_of_the_same_code_in_the_run(function: str, make_engine: Callable[[], Any]) -> None:
    with custom_parts.start(function) as environment:
        loop = CallersLoop() if make_engine is FakeEngine else LoopThread()
        runner = make_runner(make_engine(), FakeRewardFunction(), environment, loop=loop)
        expected = runner.evaluate(prompts(3), 2, SAMPLING, (3, 1))
        runner.close()
    with hosted(function, make_engine()) as there:
        found = there.runner.evaluate(prompts(3), 2, SAMPLING, (3, 1))
        assert there.process_of(found) == {there.environment._child._process.pid}
        assert there.process_of(found) != {float(os.getpid())}
    assert_same_trajectories(without_process(found), without_process(expected))


@pytest.mark.parametrize("engine", [FakeEngine(), ScriptedEngine(token_s=0.01)])
def test_requests_of_a_trajectory_overlap(engine: Any) -> None:
    """In lockstep they are in one batch."""
    with hosted("two_at_once", engine) as there:
        found = there.make(3)
    assert [(each.num_sequences, each.num_turns, each.fault) for each in found] == [(2, 2, None)] * 3
    seeds = engine.requests[0].seeds if isinstance(engine, FakeEngine) else engine.seeds
    assert len(set(seeds)) == 6
    if isinstance(engine, FakeEngine):
        (batch,) = engine.requests
        assert [prompt[-1] for prompt in batch.prompts] == [7, 8] * 3
    else:
        assert engine.most_running >= 6


class Routing(ScriptedEngine):
    """Gives routes, which stay in the run, and keeps them."""

    def __init__(self, token_s: float = 0.0) -> None:
        super().__init__(token_s=token_s)
        self.given: list[StoredRows] = []

    async def generate(self, request: GenerationRequest) -> GeneratedSequence:
        found = await super().generate(request)
        size = len(request.token_ids) + len(found.token_ids)
        routes = StoredRows.of(np.full((size, 2, 1), len(self.seeds), np.int16))
        self.given.append(routes)
        return replace(found, routed_experts=routes)


def test_large_values_stay_in_the_run() -> None:
    """Routes come back as those that the engine gave, of both turns."""
    engine = Routing()
    with hosted("two_turns", engine) as there:
        (found,) = there.make(1)
    (sequence,) = found.sequences
    assert sequence.routed_experts is not None
    sources = [piece.source for piece in sequence.routed_experts.pieces]
    assert [source is given.pieces[0].source for source, given in zip(sources, engine.given, strict=True)] == [True] * 2
    assert sequence.routed_experts.end == len(sequence) - 1


@pytest.mark.parametrize(
    ("what", "fault", "reason", "make_engine"),
    [
        ("blocks", Fault.TIMEOUT, "its code blocked the process for more than 1.5 s", FakeEngine),
        pytest.param("exits", Fault.DIED, "exit code 3", ScriptedEngine, marks=pytest.mark.full),
        pytest.param("is killed", Fault.DIED, "signal SIGKILL", FakeEngine, marks=pytest.mark.full),
        # Although its child goes on.
        pytest.param("forks and exits", Fault.DIED, "exit code 3", FakeEngine, marks=pytest.mark.full),
    ],
)
def test_who_ends_the_process_fails_alone(
    what: str, fault: Fault, reason: str, make_engine: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULT_OF_TESTS", what)
    monkeypatch.setattr(connection, "BLOCKED_S", 1.0)
    monkeypatch.setattr(connection, "LOOK_S", 0.5)
    with hosted("with_fault", make_engine(), timeout_s=1.5) as there:
        found = there.make()
        assert [each.fault for each in found] == [None, fault, None]
        assert found[1].fault_message.startswith(f"the process of its trajectories ended: {reason}")
        assert [each.num_turns for each in found] == [3, 0, 3]
        assert f"{NAME}: the process of its trajectories has ended; another one is started" in there.heard
        if what == "blocks":
            assert any(
                "has blocked the process of its trajectories for 1 s (train:1, response 1 of 1)" in text
                for text in there.heard
            )
        healthy = there.make(number=1, seed=2)
        assert healthy[0].fault is None


@pytest.mark.full
def test_the_others_are_those_of_a_run_without_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAULT_OF_TESTS", "exits")
    engine = FakeEngine()
    with hosted("with_fault", engine) as there:
        found = there.make()
    monkeypatch.setenv("FAULT_OF_TESTS", "")
    with hosted("with_fault") as there:
        expected = there.make()
    for number in (0, 2):
        assert_same_trajectories(without_process([found[number]]), without_process([expected[number]]))
    first_requests = [prompt for batch in engine.requests for prompt in batch.prompts].count(prompts(1)[0].token_ids)
    assert first_requests == 1, "an answer that was there is not asked for again"


@pytest.mark.full
@pytest.mark.parametrize(
    ("what", "settings", "fault", "text"),
    [
        ("raises SystemExit", {"memory_mb": 200}, Fault.ERROR, "SystemExit: enough"),
        ("allocates", {"memory_mb": 200}, Fault.ERROR, "MemoryError"),
        (
            "hangs",
            {"timeout_s": 1.0},
            Fault.TIMEOUT,
            "took longer than env.rollout_timeout_s=1 (at custom_parts.py:",
        ),
    ],
)
def test_who_raises_or_hangs_costs_its_trajectory_and_no_process(
    what: str, settings: dict[str, Any], fault: Fault, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULT_OF_TESTS", what)
    with hosted("with_fault", **settings) as there:
        found = there.make()
        assert [each.fault for each in found] == [None, fault, None]
        assert text in found[1].fault_message
        assert found[1].num_turns == 1, "what it had is kept"
        assert len(there.process_of(found)) == 1
        assert not any("process" in line and "ended" in line for line in there.heard)


@pytest.mark.full
def test_a_task_that_blocks_costs_who_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAULT_OF_TESTS", "blocks in a task")
    monkeypatch.setattr(connection, "BLOCKED_S", 0.5)
    monkeypatch.setattr(connection, "LOOK_S", 0.5)
    with hosted("with_fault", timeout_s=1.0) as there:
        found = there.make()
    assert found[1].fault is Fault.TIMEOUT


def test_prints_reach_the_user_with_the_name_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAULT_OF_TESTS", "prints")
    with hosted("with_fault") as there:
        there.make()
    assert f"{NAME}: a line of the user's" in there.printed
    assert f"{NAME}: and one of an error" in there.printed


@pytest.mark.full
def test_a_response_that_nobody_waits_for_is_no_answer_to_the_next_request() -> None:
    with hosted("asks_again", ScriptedEngine(token_s=0.05)) as there:
        (found,) = there.make(1)
    assert found.fault is None
    assert found.num_turns == 2


@pytest.mark.full
@pytest.mark.parametrize(
    ("start", "error", "message"),
    [
        (custom_parts.cannot_start, WorkerDiedError, f"{NAME}: cannot start: ValueError: the library is too old"),
        (custom_parts.is_wrong, ConfigurationError, "env.driver: is wrong"),
        (custom_parts.exits_at_start, WorkerDiedError, f"{NAME}: the process ended while starting: exit code 3"),
    ],
)
def test_an_environment_that_cannot_start_says_why(start: Any, error: type[Exception], message: str) -> None:
    environment = RemoteEnvironment(settings_of(start), NAME, print, print)
    try:
        with pytest.raises(error, match=re.escape(message)):
            environment.wait_for_start()
    finally:
        environment.stop()


@pytest.mark.full
def test_processes_that_all_end_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something else kills them while their trajectories wait."""

    class Killing(ScriptedEngine):
        async def generate(self, request: GenerationRequest) -> GeneratedSequence:
            await asyncio.sleep(0.5)  # its code has run up to its request
            there.environment._child._process.kill()
            return await super().generate(request)

    monkeypatch.setattr(client, "MOST_ENDS", 2)
    engine = Killing(token_s=0.5)
    with hosted("two_turns", engine) as there, pytest.raises(WorkerDiedError, match="has ended 2 times in a row"):
        there.make(1)


@pytest.mark.full
def test_a_late_message_of_a_cancelled_trajectory_is_dropped() -> None:
    """The process has sent the end, with handles of values that are gone."""
    with hosted("two_turns", Routing(token_s=0.01)) as there:
        before = there.process_of(there.make())
        for number in range(40):
            there.cancel_a_group(range(8), after_s=0.004 * number)
        assert there.process_of(there.make(seed=2)) == before
        assert there.heard == []


@pytest.mark.full
def test_a_trajectory_that_is_cancelled_while_the_process_is_replaced_ends_nothing() -> None:
    with hosted("two_turns", ScriptedEngine()) as there:
        (before,) = there.process_of(there.make())
        os.kill(int(before), signal.SIGKILL)
        there.cancel_a_group([1], after_s=0.5)
        found = there.make()
        assert [each.fault for each in found] == [None] * 3
        assert there.process_of(found) == {there.environment._child._process.pid}


def test_a_process_that_ends_while_nothing_runs_costs_no_trajectory() -> None:
    """The loop of a synchronous run rests while the trainer works, and has not read that the connection is closed."""
    with hosted("two_turns", FakeEngine()) as there:
        (before,) = there.process_of(there.make())
        os.kill(int(before), signal.SIGKILL)
        there.environment._child._process.wait()
        found = there.make(seed=2)
        assert [each.fault for each in found] == [None] * 3
        assert there.process_of(found) != {before}


def test_the_environment_may_clean_up(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FILE_OF_TESTS", str(tmp_path / "cleaned"))
    environment = RemoteEnvironment(settings_of(custom_parts.cleans_up), NAME, print, print)
    environment.wait_for_start()
    environment.stop()
    assert (tmp_path / "cleaned").read_text() == "yes"


@pytest.mark.full
def test_time_of_the_engine_in_lockstep_does_not_count() -> None:
    """Others are answered by further batches while this one computes."""

    class Slow(FakeEngine):
        def answers(self, requests: Any) -> Iterator[tuple[int, GeneratedSequence]]:
            for answer in super().answers(requests):
                time.sleep(0.5)
                yield answer

    with custom_parts.start("waits_a_little") as environment:
        runner = make_runner(Slow(), FakeRewardFunction(), environment, timeout_s=0.4)
        assert [each.fault for each in runner.evaluate(prompts(3), 1, SAMPLING, (3, 1))] == [None] * 3
        runner.close()
