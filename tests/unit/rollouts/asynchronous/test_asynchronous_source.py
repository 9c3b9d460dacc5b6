# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The asynchronous source beside the synchronous one, over one engine, real sessions and real environments."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from nemo_rl_moe.algorithms.grpo_batch import make_source
from nemo_rl_moe.data.prompts import Prompt
from nemo_rl_moe.metrics import PhaseClock
from nemo_rl_moe.rollouts.asynchronous.accounts import TrajectoryBatch
from nemo_rl_moe.rollouts.asynchronous.activity import EngineActivity
from nemo_rl_moe.rollouts.asynchronous.admission import Bounds
from nemo_rl_moe.rollouts.asynchronous.dispatcher import Dispatcher
from nemo_rl_moe.rollouts.asynchronous.gate import EngineGate
from nemo_rl_moe.rollouts.asynchronous.group_maker import group_seeds
from nemo_rl_moe.rollouts.asynchronous.groups import Ticket
from nemo_rl_moe.rollouts.asynchronous.loops import LoopThread, RunCoroutine
from nemo_rl_moe.rollouts.asynchronous.prompts import QueueState
from nemo_rl_moe.rollouts.asynchronous.schedule import ScheduledStep
from nemo_rl_moe.rollouts.asynchronous.source import AsynchronousSource, feed_of_epochs
from nemo_rl_moe.rollouts.asynchronous.staleness import make_policy
from nemo_rl_moe.rollouts.environment import Environment, SingleTurn
from nemo_rl_moe.rollouts.limits import RolloutsGivenUpError
from nemo_rl_moe.rollouts.source import RolloutGroups
from nemo_rl_moe.rollouts.trajectory import Trajectory
from nemo_rl_moe.runs.folder.time_line import (
    FOR_TRAINING,
    GENERATING,
    OF_VALIDATION,
    PAUSED,
    WAITING,
    TimeLine,
    seconds_of,
)
from tests.support.grpo_fakes import SAMPLING, FakeRewardFunction, make_worker, prompts, small_config
from tests.support.scripted_engine import ScriptedEngine, TwoTurns, loader, make_session_groups
from tests.support.trajectories import assert_same_trajectories, only_sequence
from tests.support.virtual_clock import VirtualLoop

NUM_EPOCHS, NUM_STEPS = 2, 6
CONFIG = small_config(f"grpo.max_num_epochs={NUM_EPOCHS}")


def asynchronous(
    run: RunCoroutine,
    engine: ScriptedEngine,
    environment: Environment | None = None,
    lag: int = 0,
    gate: EngineGate | None = None,
    state: QueueState[Prompt, list[Trajectory]] | None = None,
    **options: Any,
) -> AsynchronousSource:
    make_group = make_session_groups(
        gate or engine, FakeRewardFunction(), environment or SingleTurn(), seed=11, groups_per_step=2, num_generations=3
    )
    policy = make_policy("policy", "in_order", Bounds(2, lag), "wait")
    dispatcher = Dispatcher(make_group, feed_of_epochs(loader(), NUM_EPOCHS, 2), policy, state=state)
    source = AsynchronousSource(dispatcher, run, len(loader()), 3, **options)
    source.updated(0 if state is None else state.version)
    return source


def synchronous_groups(environment: Environment) -> list[RolloutGroups]:
    """The groups of all steps of the synchronous source; each step has new weights."""
    engine = ScriptedEngine()
    source = make_source(CONFIG, make_worker(engine, FakeRewardFunction(), environment), loader(), SAMPLING)
    found = []
    while not source.is_used_up:
        found.append(source.next(len(found), PhaseClock()))
        engine.version += 1
    return found


@contextmanager
def virtual_loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop()
    yield loop
    loop.close()


def train(run: RunCoroutine, source: AsynchronousSource, engine: ScriptedEngine, step: int) -> RolloutGroups:
    """One step of a loop, in which training takes a second."""
    groups = source.next(step, PhaseClock())
    run(asyncio.sleep(1.0))
    source.update_pending(step + 1)
    engine.version = step + 1
    source.updated(step + 1)
    return groups


def assert_same(one: RolloutGroups, other: RolloutGroups) -> None:
    assert len(one.trained) == len(other.trained) == 6
    assert (one.num_generations, one.num_rounds, one.num_filled) == (
        other.num_generations,
        other.num_rounds,
        other.num_filled,
    )
    assert_same_trajectories(one.trained, other.trained)


@pytest.mark.parametrize("environment", [SingleTurn(), TwoTurns()], ids=["one turn", "two turns"])
@pytest.mark.parametrize("token_s", [0.0, 0.3])
def test_without_staleness_it_is_the_synchronous_source(environment: Environment, token_s: float) -> None:
    """Prompts, order, tokens, versions and rewards are equal, however long the engine takes."""
    expected = synchronous_groups(environment)
    assert len(expected) == NUM_STEPS
    with virtual_loop() as loop:
        engine = ScriptedEngine(token_s)
        source = asynchronous(loop.run_until_complete, engine, environment)
        for step, groups in enumerate(expected):
            assert not source.is_used_up
            assert_same(train(loop.run_until_complete, source, engine, step), groups)
        assert source.is_used_up
        assert source.steps_per_epoch == 3


def test_with_staleness_tokens_carry_the_version_that_sampled_them() -> None:
    """A trajectory that runs when weights change has both versions; its group has that of the dispatch (A1)."""
    with virtual_loop() as loop:
        engine, steps = ScriptedEngine(token_s=2.0), list[ScheduledStep]()

        def record(batch: TrajectoryBatch) -> dict[str, float]:
            steps.append(ScheduledStep.of(batch))
            return {}

        source = asynchronous(loop.run_until_complete, engine, TwoTurns(), lag=1, observe=record)
        found = [train(loop.run_until_complete, source, engine, step) for step in range(4)]
        assert source.stop(), "groups ran ahead"
    assert [[group.version for group in step.groups] for step in steps] == [[0, 0], [0, 0], [1, 1], [2, 2]]
    mixed = [set(only_sequence(each).weight_versions.tolist()) - {-1} for groups in found for each in groups.trained]
    assert {0, 1} in mixed
    for step, groups in enumerate(found):
        for each in groups.trained:
            sampled = only_sequence(each).weight_versions[only_sequence(each).weight_versions >= 0]
            assert (np.diff(sampled) >= 0).all()
            assert max(0, step - 1) <= sampled.min() <= sampled.max() <= step


def test_a_run_that_goes_on_trains_on_what_was_finished() -> None:
    with virtual_loop() as loop:
        whole = asynchronous(loop.run_until_complete, engine := ScriptedEngine(0.1), lag=2)
        expected = [train(loop.run_until_complete, whole, engine, step) for step in range(NUM_STEPS)]
        first = asynchronous(loop.run_until_complete, engine := ScriptedEngine(0.1), lag=2)
        for step in range(2):
            train(loop.run_until_complete, first, engine, step)
        state = first.queue_state(2)
        first.stop()
        assert state.queue, "something was ready"
        second = asynchronous(loop.run_until_complete, engine, lag=2, state=state)
        found = [train(loop.run_until_complete, second, engine, step) for step in range(2, NUM_STEPS)]
    names = [[each.group_id for each in groups.trained] for groups in expected]
    assert [[each.group_id for each in groups.trained] for groups in found] == names[2:]
    restored = [trajectory for queued in state.queue for trajectory in queued.group]
    assert found[0].trained[:3] == restored[:3]


def test_another_try_has_other_seeds() -> None:
    prompt = prompts(1)[0]
    tickets = [Ticket(prompt, position, 0, 0, attempt) for position in range(4) for attempt in range(3)]
    seeds = [seed for ticket in tickets for seed in group_seeds(ticket, 11, groups_per_step=2, num_generations=3)]
    assert len(set(seeds)) == len(tickets) * 3


def test_a_stopped_source_gives_the_step_up() -> None:
    with virtual_loop() as loop:
        source = asynchronous(loop.run_until_complete, ScriptedEngine())
        source.stop()
        with pytest.raises(RolloutsGivenUpError, match="stopped"):
            source.next(0, PhaseClock())


def test_a_thread_generates_while_the_main_thread_does_something_else() -> None:
    expected = synchronous_groups(SingleTurn())
    thread, engine = LoopThread(), ScriptedEngine()
    try:
        source = asynchronous(thread.run, engine)
        for step, groups in enumerate(expected):
            assert_same(source.next(step, PhaseClock()), groups)
            source.update_pending(step + 1)
            engine.version = step + 1
            source.updated(step + 1)
    finally:
        thread.close()


@pytest.mark.parametrize("lag", [0, 1])
def test_each_step_says_who_waited(lag: int) -> None:
    """Training takes a second of virtual time, and the longest response six tenths; there is a validation between."""
    with virtual_loop() as loop:
        engine, activity, lines = ScriptedEngine(token_s=0.1), EngineActivity(loop.time), list[TimeLine]()
        gate = EngineGate(engine, activity)
        options = {"pause": gate.close, "resume": gate.open, "engines": activity, "record": lines.append}
        loop.run_until_complete(asyncio.sleep(7.0))  # before the first weights
        run = loop.run_until_complete
        source = asynchronous(run, engine, lag=lag, gate=gate, **options)
        shares = []
        for step in range(3):
            found = train(run, source, engine, step).metrics
            shares.append((found["rollouts/idle_share/trainer"], found["rollouts/idle_share/engines"]))
            if step == 1:
                with source.paused():
                    loop.run_until_complete(asyncio.sleep(50.0))
        source.stop()
    steps = lines[-1].steps
    assert [len(line.steps) for line in lines] == [1, 2, 3]
    assert [seconds_of(step.engines, OF_VALIDATION) for step in steps] == [0.0, 0.0, 50.0]
    generating, waiting = (
        [seconds_of(getattr(step, who), state) for step in steps]
        for who, state in (("engines", GENERATING), ("trainer", WAITING))
    )
    assert steps[0].seconds == generating[0] == waiting[0] < 1.0
    if lag == 0:  # in turns: training waits whenever engines generate
        assert generating[:2] == pytest.approx(waiting[:2])
        assert steps[1].seconds == pytest.approx(1 + waiting[1])
        assert shares[1] == pytest.approx((waiting[1] / (1 + waiting[1]), 1 / (1 + waiting[1])))
        assert waiting[2] == 0.0, "the running requests ended before the validation"
        assert shares[2] == pytest.approx((0.0, 1 / (1 + generating[2])))
    else:  # generation hides behind training
        assert waiting[1:] == [0.0, 0.0]
        assert [share for share, _ in shares] == [pytest.approx(1.0), 0.0, 0.0]
        assert all(seconds_of(step.engines, FOR_TRAINING) + seconds_of(step.engines, PAUSED) > 0 for step in steps[1:])
