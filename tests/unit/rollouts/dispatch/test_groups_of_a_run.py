# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Groups of the rollout runner in an asynchronous run: added rewards, limits, errors and ends."""

import asyncio
import itertools
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_moe.checkpoints.state import LoopState
from nemo_rl_moe.generation.interface import GenerationEngine
from nemo_rl_moe.launch.rollouts import SCHEDULE_FILE, plan_rollouts, running_source, state_at
from nemo_rl_moe.metrics import PhaseClock
from nemo_rl_moe.rewards.interface import Fault, Score
from nemo_rl_moe.rollouts.dispatch.schedule import read_schedule
from nemo_rl_moe.rollouts.dispatch.source import SampledGroups
from nemo_rl_moe.rollouts.environment import Environment, Session, SingleTurn
from nemo_rl_moe.rollouts.loops import CallersLoop, LoopThread
from nemo_rl_moe.rollouts.rollout_function import RolloutFunction
from nemo_rl_moe.rollouts.runner import RolloutRunner
from nemo_rl_moe.rollouts.supervisor import QUIET_S, STOP_GRACE_S, RolloutReports, RolloutsGivenUpError
from nemo_rl_moe.rollouts.trajectory import Trajectory
from tests.support.clocks_and_disks import MovedClock
from tests.support.grpo_fakes import (
    SAMPLING,
    FakeEngine,
    FakeRewardFunction,
    make_runner,
    small_config,
)
from tests.support.scripted_rollouts import ScriptedEngine, loader

WITH_COPY = ("policy.generation.backend=vllm",)
EngineOf = Callable[[], GenerationEngine]


def runner_of(
    engine: Any, environment: Environment, reports: RolloutReports | None = None, clock: Any = None, **more: Any
) -> RolloutRunner:
    events = None if clock is None else clock.loop()
    loop = CallersLoop(events) if engine.shares_weights else LoopThread(events)
    return make_runner(engine, FakeRewardFunction(), environment, loop=loop, reports=reports, **more)


@contextmanager
def source_of(
    runner: RolloutRunner,
    tmp_path: Any,
    *overrides: str,
    warn: Callable[[str], None] = lambda text: None,
    step: int = 0,
) -> Iterator[SampledGroups]:
    backend = () if runner.engine.shares_weights else WITH_COPY
    config = small_config("grpo.max_num_epochs=2", "grpo.rollouts.mode=asynchronous", *backend, *overrides)
    plan = plan_rollouts(config)
    with (
        closing(runner),
        running_source(
            config,
            plan,
            runner,
            loader(),
            SAMPLING,
            tmp_path,
            state_at(config, LoopState(step, step), None, loader()),
            warn,
            lambda text: None,
        ) as source,
    ):
        source.updated(step)
        yield source


def test_rewards_of_groups_that_end_while_others_are_scored_are_added_in_one_call(tmp_path: Any) -> None:
    """The first call holds its group until the others have ended; a call for each would be one after the other."""
    sizes: list[int] = []
    others_have_ended, num_ended = threading.Event(), itertools.count(1)

    async def one_turn(session: Session) -> Trajectory:
        await session.generate()
        if next(num_ended) == 12:  # four groups of three, of two steps; then they ask for their rewards
            asyncio.get_running_loop().call_later(0.2, others_have_ended.set)
        return session.finish(Score(1.0, is_correct=True))

    def add_rewards(found: Sequence[Trajectory]) -> list[Trajectory]:
        sizes.append(len(found))
        assert others_have_ended.wait(60)
        return [replace(each, reward=each.reward + 1) for each in found]

    runner = runner_of(ScriptedEngine(), RolloutFunction(one_turn, "here:one_turn"), add_rewards=add_rewards)
    with source_of(runner, tmp_path, "grpo.rollouts.max_staleness=1") as source:
        groups = [source.next(0, PhaseClock())]
        source.update_pending(1)
        source.updated(1)
        groups.append(source.next(1, PhaseClock()))
    assert [each.reward for found in groups for each in found.trained] == [2.0] * 12
    assert sizes[0] < 12
    assert sum(sizes[:2]) == 12


@pytest.mark.parametrize("make_engine", [FakeEngine, ScriptedEngine])
def test_rewards_are_added_to_groups(make_engine: EngineOf, tmp_path: Any) -> None:
    sizes: list[int] = []

    def add_rewards(found: Sequence[Trajectory]) -> list[Trajectory]:
        sizes.append(len(found))
        return [replace(each, reward=each.reward + each.num_tokens, rewards={"reward_model": 1.0}) for each in found]

    trained = []
    for add in (None, add_rewards):
        runner = runner_of(make_engine(), SingleTurn(), add_rewards=add)
        with source_of(runner, tmp_path, "grpo.rollouts.max_staleness=0") as source:
            trained.append(source.next(0, PhaseClock()).trained)
    assert [each.reward for each in trained[1]] == [each.reward + each.num_tokens for each in trained[0]]
    assert all(each.rewards for each in trained[1])
    # In lockstep all groups of a step at once, so that a run can be repeated to the bit.
    assert sizes == ([6] if make_engine is FakeEngine else [3, 3])


def test_a_trajectory_that_takes_too_long_fails_and_its_group_is_whole(tmp_path: Any) -> None:
    async def hangs(session: Session) -> Trajectory:
        turn = await session.generate()
        if session.seed % 3 == 0:
            await asyncio.sleep(1000.0)
        return session.finish(Score(float(len(turn.token_ids)), is_correct=False))

    runner = runner_of(ScriptedEngine(), RolloutFunction(hangs, "here:hangs"), timeout_s=0.3)
    with source_of(runner, tmp_path) as source:
        groups = source.next(0, PhaseClock())
        assert len(groups.trained) == 6
        faults = [each.fault for each in groups.trained]
        assert set(faults) <= {None, Fault.TIMEOUT}
        assert Fault.TIMEOUT in faults + [each.fault for each in source.next(0, PhaseClock()).trained]


def test_an_error_of_the_engine_ends_the_run_with_itself(tmp_path: Any) -> None:
    class Broken(ScriptedEngine):
        async def generate(self, request: Any) -> Any:
            raise RuntimeError("the engine is gone")

    class BrokenInLockstep(FakeEngine):
        def answers(self, requests: Any) -> Any:
            raise RuntimeError("the ranks are gone")

    with source_of(runner_of(Broken(), SingleTurn()), tmp_path) as source:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="the engine is gone"):
                source.next(0, PhaseClock())
    in_lockstep = runner_of(BrokenInLockstep(), SingleTurn())
    lockstep_source = source_of(in_lockstep, tmp_path, "grpo.rollouts.max_staleness=0")
    with lockstep_source as source, pytest.raises(RuntimeError, match="the ranks are gone"):
        source.next(0, PhaseClock())


def test_a_request_to_stop_gives_up_what_hangs(tmp_path: Any) -> None:
    clock, asked = MovedClock(), [False]
    reports = RolloutReports(lambda: "SIGTERM" if asked[0] else None)

    async def hangs(session: Session) -> Trajectory:
        asked[0] = True
        loop = asyncio.get_running_loop()
        for _ in range(100):
            clock.move(STOP_GRACE_S / 5)
            await asyncio.sleep(0.05)
        await loop.create_future()
        raise AssertionError

    runner = runner_of(ScriptedEngine(), RolloutFunction(hangs, "here:function"), reports, clock)
    with source_of(runner, tmp_path) as source, pytest.raises(RolloutsGivenUpError, match="SIGTERM"):
        source.next(0, PhaseClock())


def test_silence_is_counted_from_the_start_of_a_group(tmp_path: Any) -> None:
    """One watch sees all steps of a run: the time in which training has the engine is no silence of a trajectory."""
    clock, begun, reported = MovedClock(), list[str](), list[str]()
    reports = RolloutReports(message=reported.append)

    async def waits(session: Session) -> Trajectory:
        begun.append(session.prompt.sample_id)
        step, number = divmod(len(begun) - 1, 6)
        if number == 0:
            clock.move_soon(QUIET_S + 1)
            for _ in range(600):
                if len(reported) > step:
                    break
                await asyncio.to_thread(time.sleep, 0.1)
        return session.finish(Score(float(len((await session.generate()).token_ids)), is_correct=False))

    runner = runner_of(FakeEngine(), RolloutFunction(waits, "here:waits"), reports, clock)
    with source_of(runner, tmp_path, "grpo.rollouts.max_staleness=0") as source:
        for step in range(2):
            source.next(step, PhaseClock())
            clock.move(100.0)
            source.update_pending(step + 1)
            source.updated(step + 1)
    assert [line.partition(";")[0] for line in reported] == ["rollouts: no progress for 11 s"] * 2


def test_a_prompt_that_is_given_up_is_reported_and_its_tokens_are_counted(tmp_path: Any) -> None:
    """A8: a stuck group is cancelled at its deadline, comes again once, and does not keep the step."""
    warned: list[str] = []

    async def stuck(session: Session) -> Trajectory:
        turn = await session.generate()
        if session.prompt.sample_id == "train:3":
            await asyncio.sleep(1000.0)
        return session.finish(Score(float(len(turn.token_ids)), is_correct=False))

    runner = runner_of(ScriptedEngine(), RolloutFunction(stuck, "here:stuck"))
    metrics: list[dict[str, float]] = []
    with source_of(runner, tmp_path, "grpo.rollouts.group_timeout_s=0.5", warn=warned.append) as source:
        step = 0
        while not source.is_used_up and step < 4:
            metrics.append(dict(source.next(step, PhaseClock()).metrics))
            step += 1
            source.update_pending(step)
            source.updated(step)
    assert any("train:3 is given up after 2 attempts (deadline)" in line for line in warned)
    wasted = [found for found in metrics if found["rollouts/wasted_tokens"]]
    assert wasted, "tokens of a group that was cancelled"
    assert all(found["rollouts/wasted_tokens"] == found["rollouts/wasted_tokens/deadline"] for found in wasted)
    assert sum(found.get("rollouts/num_cancelled/deadline", 0) for found in metrics) >= 2


def test_the_schedule_survives_the_deletion_of_its_folder_and_a_torn_line(tmp_path: Path) -> None:
    folder, path, warnings = tmp_path / "run", tmp_path / "run" / SCHEDULE_FILE, list[str]()
    folder.mkdir()
    runner = runner_of(FakeEngine(), SingleTurn())
    with source_of(runner, folder, "grpo.rollouts.max_staleness=0", warn=warnings.append) as source:
        source.next(0, PhaseClock())
        shutil.rmtree(folder)
        source.update_pending(1)
        source.updated(1)
        source.next(1, PhaseClock())
        assert warnings == [f"{path} was removed; it begins anew, without the earlier lines"]
        source.update_pending(2)
        source.updated(2)
        source.next(2, PhaseClock())
    assert [step.version for step in read_schedule(path)] == [1, 2]
    path.write_text(path.read_text() + '{"step": 4, "vers')  # a kill, after the checkpoint of step 2
    again = runner_of(FakeEngine(), SingleTurn())
    with source_of(again, folder, "grpo.rollouts.max_staleness=0", step=2) as source:
        source.next(2, PhaseClock())
    assert [step.version for step in read_schedule(path)] == [1, 2]
    assert len(path.read_text().splitlines()) == 2
