# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Groups of a rollout worker, made one at a time: the synchronous ones, and their limits, errors and ends."""

import asyncio
import itertools
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_moe.algorithms.grpo_batch import make_source
from nemo_rl_moe.checkpoints.state import LoopState
from nemo_rl_moe.generation.interface import GenerationEngine
from nemo_rl_moe.launch.asynchronous import SCHEDULE_FILE, plan_rollouts, running_source, state_at
from nemo_rl_moe.metrics import PhaseClock
from nemo_rl_moe.rewards.interface import Fault, Score
from nemo_rl_moe.rollouts.asynchronous import loops
from nemo_rl_moe.rollouts.asynchronous.schedule import read_schedule
from nemo_rl_moe.rollouts.asynchronous.source import AsynchronousSource
from nemo_rl_moe.rollouts.environment import Environment, Session, SingleTurn
from nemo_rl_moe.rollouts.limits import POLL_S, QUIET_S, STOP_GRACE_S, RolloutLimits, RolloutsGivenUpError
from nemo_rl_moe.rollouts.rollout_function import RolloutFunction
from nemo_rl_moe.rollouts.source import RolloutGroups
from nemo_rl_moe.rollouts.trajectory import Trajectory
from nemo_rl_moe.rollouts.worker import RolloutWorker
from tests.support.grpo_fakes import (
    SAMPLING,
    FakeEngine,
    FakeRewardFunction,
    as_numbers,
    from_numbers,
    small_config,
)
from tests.support.scripted_engine import ScriptedEngine, TwoTurns, loader
from tests.support.trajectories import assert_same_trajectories

WITH_COPY = ("policy.generation.backend=vllm",)
EngineOf = Callable[[], GenerationEngine]


def worker_of(engine: Any, environment: Environment, limits: RolloutLimits | None = None, **more: Any) -> RolloutWorker:
    return RolloutWorker(
        engine,
        FakeRewardFunction(),
        environment,
        as_numbers,
        from_numbers,
        100,
        limits=limits or RolloutLimits(),
        **more,
    )


@contextmanager
def source_of(
    worker: RolloutWorker,
    tmp_path: Any,
    *overrides: str,
    warn: Callable[[str], None] = lambda text: None,
    step: int = 0,
) -> Iterator[AsynchronousSource]:
    backend = () if worker.engine.shares_weights else WITH_COPY
    config = small_config("grpo.max_num_epochs=2", "grpo.rollouts.mode=asynchronous", *backend, *overrides)
    plan = plan_rollouts(config)
    assert plan is not None
    with running_source(
        config,
        plan,
        worker,
        loader(),
        SAMPLING,
        tmp_path,
        state_at(config, LoopState(step, step), None, loader()),
        warn,
        lambda text: None,
    ) as source:
        source.updated(step)
        yield source


def assert_same(one: RolloutGroups, other: RolloutGroups) -> None:
    assert_same_trajectories(one.trained, other.trained)


@pytest.mark.parametrize("environment", [SingleTurn(), TwoTurns()], ids=["one turn", "two turns"])
@pytest.mark.parametrize(
    "make_engine", [lambda: FakeEngine(), lambda: FakeEngine(shares_weights=False), ScriptedEngine]
)
def test_without_staleness_groups_are_those_of_the_synchronous_source(
    make_engine: EngineOf, environment: Environment, tmp_path: Any
) -> None:
    """Tokens, seeds, rewards and names are equal, and the trainer's engine sees the same batches of requests."""
    first, second = make_engine(), make_engine()
    config = small_config("grpo.max_num_epochs=2")
    expected = make_source(config, worker_of(first, environment), loader(), SAMPLING)
    with source_of(worker_of(second, environment), tmp_path, "grpo.rollouts.max_staleness=0") as source:
        for step in range(6):
            assert not source.is_used_up
            groups = source.next(step, PhaseClock())
            assert_same(groups, expected.next(step, PhaseClock()))
            assert groups.is_on_policy
            source.update_pending(step + 1)
            source.updated(step + 1)
            with source.paused():
                pass
        assert source.is_used_up
    if isinstance(first, FakeEngine) and isinstance(second, FakeEngine) and first.shares_weights:
        assert second.requests == first.requests


@pytest.mark.parametrize("make_engine", [FakeEngine, ScriptedEngine])
def test_a_failed_trajectory_is_tried_again_as_in_a_synchronous_run(make_engine: EngineOf, tmp_path: Any) -> None:
    async def fails(session: Session) -> Trajectory:
        turn = await session.generate()
        if session.seed % 3 == 0:
            raise OSError("the tool is away")
        return session.finish(Score(float(len(turn.token_ids)), is_correct=False))

    def worker() -> RolloutWorker:
        return worker_of(make_engine(), RolloutFunction(fails, "here:fails"), num_attempts=2)

    expected = make_source(small_config("grpo.max_num_epochs=2"), worker(), loader(), SAMPLING).next(0, PhaseClock())
    with source_of(worker(), tmp_path, "grpo.rollouts.max_staleness=0") as source:
        assert_same(source.next(0, PhaseClock()), expected)
    assert sum(trajectory.num_retries for trajectory in expected.trained) > 0


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

    worker = worker_of(ScriptedEngine(), RolloutFunction(one_turn, "here:one_turn"), add_rewards=add_rewards)
    with source_of(worker, tmp_path, "grpo.rollouts.max_staleness=1") as source:
        groups = [source.next(0, PhaseClock())]
        source.update_pending(1)
        source.updated(1)
        groups.append(source.next(1, PhaseClock()))
    assert [each.reward for found in groups for each in found.trained] == [2.0] * 12
    assert sizes[0] < 12
    assert sum(sizes[:2]) == 12


@pytest.mark.parametrize("make_engine", [FakeEngine, ScriptedEngine])
def test_rewards_are_added_to_groups_as_in_a_synchronous_run(make_engine: EngineOf, tmp_path: Any) -> None:
    sizes: list[int] = []

    def add_rewards(found: Sequence[Trajectory]) -> list[Trajectory]:
        sizes.append(len(found))
        return [replace(each, reward=each.reward + each.num_tokens, rewards={"reward_model": 1.0}) for each in found]

    def worker() -> RolloutWorker:
        return worker_of(make_engine(), SingleTurn(), add_rewards=add_rewards)

    expected = make_source(small_config("grpo.max_num_epochs=2"), worker(), loader(), SAMPLING).next(0, PhaseClock())
    assert sizes == [6], "a whole round"
    with source_of(worker(), tmp_path, "grpo.rollouts.max_staleness=0") as source:
        assert_same(source.next(0, PhaseClock()), expected)
    assert set(sizes[1:]) == {3}, "each group as it ends"
    assert all(each.rewards for each in expected.trained)


def test_a_trajectory_that_takes_too_long_fails_and_its_group_is_whole(tmp_path: Any) -> None:
    async def hangs(session: Session) -> Trajectory:
        turn = await session.generate()
        if session.seed % 3 == 0:
            await asyncio.sleep(1000.0)
        return session.finish(Score(float(len(turn.token_ids)), is_correct=False))

    limits = RolloutLimits(0.3, "here:hangs")
    worker = worker_of(ScriptedEngine(), RolloutFunction(hangs, "here:hangs"), limits)
    with source_of(worker, tmp_path) as source:
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

    with source_of(worker_of(Broken(), SingleTurn()), tmp_path) as source:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="the engine is gone"):
                source.next(0, PhaseClock())
    in_lockstep = worker_of(BrokenInLockstep(), SingleTurn())
    lockstep_source = source_of(in_lockstep, tmp_path, "grpo.rollouts.max_staleness=0")
    with lockstep_source as source, pytest.raises(RuntimeError, match="the ranks are gone"):
        source.next(0, PhaseClock())


def test_a_request_to_stop_gives_up_what_hangs(tmp_path: Any) -> None:
    clock, asked = [0.0], [False]
    limits = RolloutLimits(None, "here:function", lambda: "SIGTERM" if asked[0] else None, clock=lambda: clock[0])

    async def hangs(session: Session) -> Trajectory:
        asked[0] = True
        loop = asyncio.get_running_loop()
        for _ in range(100):
            clock[0] += STOP_GRACE_S / 5
            await asyncio.sleep(0.05)
        await loop.create_future()
        raise AssertionError

    worker = worker_of(ScriptedEngine(), RolloutFunction(hangs, "here:function"), limits)
    with source_of(worker, tmp_path) as source, pytest.raises(RolloutsGivenUpError, match="SIGTERM"):
        source.next(0, PhaseClock())


def test_silence_is_counted_from_the_start_of_a_group(tmp_path: Any) -> None:
    """One watch sees all steps of a run: the time in which training has the engine is no silence of a trajectory."""
    clock, begun, reported = [0.0], list[str](), list[str]()
    limits = RolloutLimits(None, "here:waits", message=reported.append, clock=lambda: clock[0])

    async def waits(session: Session) -> Trajectory:
        begun.append(session.prompt.sample_id)
        step, number = divmod(len(begun) - 1, 6)
        if number == 0:
            await asyncio.sleep(3 * POLL_S)
            clock[0] += QUIET_S + 1
            for _ in range(600):
                if len(reported) > step:
                    break
                await asyncio.sleep(0.1)
        return session.finish(Score(float(len((await session.generate()).token_ids)), is_correct=False))

    worker = worker_of(FakeEngine(), RolloutFunction(waits, "here:waits"), limits)
    with source_of(worker, tmp_path, "grpo.rollouts.max_staleness=0") as source:
        for step in range(2):
            source.next(step, PhaseClock())
            clock[0] += 100.0
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

    worker = worker_of(ScriptedEngine(), RolloutFunction(stuck, "here:stuck"))
    metrics: list[dict[str, float]] = []
    with source_of(worker, tmp_path, "grpo.rollouts.group_timeout_s=0.5", warn=warned.append) as source:
        step = 0
        while not source.is_used_up and step < 4:
            metrics.append(dict(source.next(step, PhaseClock()).metrics))
            step += 1
            source.update_pending(step)
            source.updated(step)
    assert any("train:3 is given up after 2 groups (deadline)" in line for line in warned)
    wasted = [found for found in metrics if found["rollouts/wasted_tokens"]]
    assert wasted, "tokens of a group that was cancelled"
    assert all(found["rollouts/wasted_tokens"] == found["rollouts/wasted_tokens/deadline"] for found in wasted)
    assert sum(found.get("rollouts/num_cancelled/deadline", 0) for found in metrics) >= 2


def test_the_schedule_survives_the_deletion_of_its_folder_and_a_torn_line(tmp_path: Path) -> None:
    folder, path, warnings = tmp_path / "run", tmp_path / "run" / SCHEDULE_FILE, list[str]()
    folder.mkdir()
    worker = worker_of(FakeEngine(), SingleTurn())
    with source_of(worker, folder, "grpo.rollouts.max_staleness=0", warn=warnings.append) as source:
        source.next(0, PhaseClock())
        shutil.rmtree(folder)
        source.update_pending(1)
        source.updated(1)
        source.next(1, PhaseClock())
        assert warnings == [f"{path} was removed; it is begun anew, and lacks the lines before"]
        source.update_pending(2)
        source.updated(2)
        source.next(2, PhaseClock())
    assert [step.version for step in read_schedule(path)] == [1, 2]
    path.write_text(path.read_text() + '{"step": 4, "vers')  # a kill, after the checkpoint of step 2
    with source_of(worker, folder, "grpo.rollouts.max_staleness=0", step=2) as source:
        source.next(2, PhaseClock())
    assert [step.version for step in read_schedule(path)] == [1, 2]
    assert len(path.read_text().splitlines()) == 2


def test_code_that_blocks_the_loop_is_left_behind_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is complete ends, although a group that no step needs blocks the thread of all."""
    monkeypatch.setattr(loops, "CLOSING_LIMIT_S", 1.0)
    blocks, is_released, warnings = threading.Event(), threading.Event(), list[str]()

    async def blocks_later(session: Session) -> Trajectory:
        await session.generate()
        if int(session.prompt.sample_id.split(":")[1]) > 2:
            blocks.set()
            is_released.wait()
        return session.finish(await session.score())

    worker = worker_of(ScriptedEngine(token_s=0.0), RolloutFunction(blocks_later, "here:blocks_later"))
    with source_of(worker, tmp_path, warn=warnings.append):
        assert blocks.wait(60)
    is_released.set()
    assert warnings == ["env.driver: code that blocks the thread of all rollouts is left behind at the end of the run"]
