# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A source of groups that run ahead of training, over a scripted engine, real sessions and real environments."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from nemo_rl_moe.metrics import PhaseClock
from nemo_rl_moe.rewards.interface import Score
from nemo_rl_moe.rollouts.dispatch.activity import EngineActivity
from nemo_rl_moe.rollouts.dispatch.admission import Bounds
from nemo_rl_moe.rollouts.dispatch.groups import Ticket
from nemo_rl_moe.rollouts.dispatch.prompts import QueueState
from nemo_rl_moe.rollouts.dispatch.schedule import ScheduledStep
from nemo_rl_moe.rollouts.dispatch.source import SampledGroups, feed_of_epochs, group_seeds
from nemo_rl_moe.rollouts.dispatch.staleness import make_policy
from nemo_rl_moe.rollouts.environment import Environment, Session
from nemo_rl_moe.rollouts.loops import CallersLoop, LoopThread, RolloutLoop
from nemo_rl_moe.rollouts.runner import RolloutRunner
from nemo_rl_moe.rollouts.source import RolloutGroups
from nemo_rl_moe.rollouts.supervisor import RolloutsGivenUpError
from nemo_rl_moe.rollouts.trajectory import Trajectory
from nemo_rl_moe.runs.folder.time_line import (
    FOR_TRAINING,
    GENERATING,
    PAUSED,
    VALIDATING,
    WAITING,
    TimeLine,
    seconds_of,
)
from tests.support.clocks_and_disks import VirtualLoop
from tests.support.grpo_fakes import SAMPLING, FakeRewardFunction, make_runner, prompts, small_config
from tests.support.grpo_inputs import assert_same_trajectories, only_sequence
from tests.support.scripted_rollouts import ScriptedEngine, loader

NUM_EPOCHS, NUM_STEPS = 2, 6


class WithTool:
    """Two turns with a tool between them that takes longer than training; the score takes no time."""

    async def rollout(self, session: Session) -> Trajectory:
        await session.generate()
        await asyncio.sleep(20.0)
        session.append([7, 8])
        await session.generate()
        return session.finish(Score(1.0, is_correct=True))


class OneTurn:
    """A turn whose score takes no time."""

    async def rollout(self, session: Session) -> Trajectory:
        await session.generate()
        return session.finish(Score(1.0, is_correct=True))


def source_of(
    engine: ScriptedEngine,
    loop: RolloutLoop,
    environment: Environment | None = None,
    lag: int = 0,
    state: QueueState | None = None,
    activity: EngineActivity | None = None,
    **options: Any,
) -> tuple[SampledGroups, RolloutRunner]:
    runner = make_runner(engine, FakeRewardFunction(), environment, loop=loop, activity=activity)
    config = small_config(
        f"grpo.max_num_epochs={NUM_EPOCHS}", "grpo.rollouts.mode=asynchronous", "grpo.rollouts.max_staleness=0"
    )
    policy = make_policy("policy", "in_order", Bounds(2, lag), "wait")
    feed = feed_of_epochs(loader(), NUM_EPOCHS, 2)
    more = {"state": state, "runs_ahead": True} | options
    source = SampledGroups(config.grpo, runner, feed, policy, SAMPLING, len(loader()), **more)
    source.updated(0 if state is None else state.version)
    return source, runner


@contextmanager
def virtual_loop() -> Iterator[tuple[VirtualLoop, RolloutLoop]]:
    """A loop in virtual time that runs while its caller waits."""
    loop = VirtualLoop()
    rollouts = CallersLoop(loop)
    yield loop, rollouts
    rollouts.close()


def train(loop: RolloutLoop, source: SampledGroups, engine: ScriptedEngine, step: int) -> RolloutGroups:
    """One step of a loop, in which training takes a second."""
    groups = source.next(step, PhaseClock())
    loop.run(asyncio.sleep(1.0))
    source.update_pending(step + 1)
    engine.version = step + 1
    source.updated(step + 1)
    return groups


def test_with_staleness_tokens_carry_the_version_that_sampled_them() -> None:
    """A trajectory that runs when weights change has both versions; its group has that of the dispatch (A1)."""
    with virtual_loop() as (_, loop):
        engine, steps = ScriptedEngine(token_s=0.2), list[ScheduledStep]()
        source, _ = source_of(
            engine, loop, WithTool(), lag=1, observe=lambda batch: steps.append(ScheduledStep.of(batch))
        )
        found = [train(loop, source, engine, step) for step in range(4)]
        assert source.stop(), "groups ran ahead"
    assert [[group.version for group in step.groups] for step in steps] == [[0, 0], [0, 0], [1, 1], [2, 2]]
    mixed = [set(only_sequence(each).weight_versions.tolist()) - {-1} for groups in found for each in groups.trained]
    assert {1, 2} in mixed
    for step, groups in enumerate(found):
        for each in groups.trained:
            sampled = only_sequence(each).weight_versions[only_sequence(each).weight_versions >= 0]
            assert (np.diff(sampled) >= 0).all()
            assert max(0, step - 1) <= sampled.min() <= sampled.max() <= step


def test_a_run_that_goes_on_trains_on_what_was_finished() -> None:
    with virtual_loop() as (_, loop):
        whole, _ = source_of(engine := ScriptedEngine(0.1), loop, lag=2)
        expected = [train(loop, whole, engine, step) for step in range(NUM_STEPS)]
        first, _ = source_of(engine := ScriptedEngine(0.1), loop, lag=2)
        for step in range(2):
            train(loop, first, engine, step)
        state = first.queue_state(2)
        first.stop()
        assert state.queue, "something was ready"
        second, _ = source_of(engine, loop, lag=2, state=state)
        found = [train(loop, second, engine, step) for step in range(2, NUM_STEPS)]
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
    with virtual_loop() as (_, loop):
        source, _ = source_of(ScriptedEngine(), loop)
        source.stop()
        with pytest.raises(RolloutsGivenUpError, match="stopped"):
            source.next(0, PhaseClock())


def test_a_thread_generates_while_the_main_thread_does_something_else() -> None:
    found: list[list[Trajectory]] = []
    for loop in (CallersLoop(), LoopThread()):
        engine = ScriptedEngine()
        source, runner = source_of(engine, loop)
        for step in range(NUM_STEPS):
            found.append(source.next(step, PhaseClock()).trained)
            source.update_pending(step + 1)
            engine.version = step + 1
            source.updated(step + 1)
        assert source.is_used_up
        runner.close()
    for one, other in zip(found[:NUM_STEPS], found[NUM_STEPS:], strict=True):
        assert_same_trajectories(one, other)


@pytest.mark.parametrize("lag", [0, 1])
def test_each_step_says_who_waited(lag: int) -> None:
    """Training takes a second of virtual time, and the longest response six tenths; there is a validation between."""
    with virtual_loop() as (virtual, loop):
        engine, lines = ScriptedEngine(token_s=0.1), list[TimeLine]()
        activity = EngineActivity(virtual.time)
        loop.run(asyncio.sleep(7.0))  # before the first weights
        source, runner = source_of(engine, loop, OneTurn(), lag=lag, activity=activity, record=lines.append)
        shares = []
        for step in range(3):
            found = train(loop, source, engine, step).metrics
            shares.append((found["rollouts/idle_share/trainer"], found["rollouts/idle_share/engines"]))
            if step == 1:
                engine.token_s = 10.0
                runner.evaluate(prompts(1, "val"), 1, SAMPLING, (1,))
                engine.token_s = 0.1
        source.stop()
    steps = lines[-1].steps
    assert [len(line.steps) for line in lines] == [1, 2, 3]
    validating = [seconds_of(step.trainer, VALIDATING) for step in steps]
    assert validating[:2] == [0.0, 0.0]
    assert validating[2] > 20.0
    generating, waiting = (
        [seconds_of(getattr(step, who), state) for step in steps]
        for who, state in (("engines", GENERATING), ("trainer", WAITING))
    )
    assert generating[2] == pytest.approx(validating[2], abs=0.5), "the engine works for the validation"
    assert steps[0].seconds == generating[0] == waiting[0] < 1.0
    if lag == 0:  # in turns: training waits whenever engines generate
        assert generating[:2] == pytest.approx(waiting[:2])
        assert steps[1].seconds == pytest.approx(1 + waiting[1])
        assert shares[1] == pytest.approx((waiting[1] / (1 + waiting[1]), 1 / (1 + waiting[1])))
        assert waiting[2] == 0.0, "the running requests ended with the validation"
        assert shares[2][0] == 0.0
    else:  # generation hides behind training
        assert waiting[1:] == [0.0, 0.0]
        assert [share for share, _ in shares] == [pytest.approx(1.0), 0.0, 0.0]
        assert seconds_of(steps[1].engines, FOR_TRAINING) + seconds_of(steps[1].engines, PAUSED) > 0
