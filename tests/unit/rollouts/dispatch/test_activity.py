# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Who worked and who waited in a step, against intervals worked out by hand and by properties."""

import asyncio
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationRequest
from nemo_rl_moe.rollouts.dispatch.activity import (
    STEPS_SHOWN,
    EngineActivity,
    RecentSteps,
    StateRecorder,
    TrainerActivity,
    idle_shares,
)
from nemo_rl_moe.rollouts.dispatch.gate import EngineGate
from nemo_rl_moe.runs.folder.time_line import (
    FOR_ENVIRONMENT,
    FOR_TRAINING,
    GENERATING,
    PAUSED,
    TRAINING,
    UPDATING,
    VALIDATING,
    WAITING,
    Interval,
    StepActivity,
    binned,
    seconds_of,
)
from tests.support.grpo_fakes import SAMPLING
from tests.support.scripted_rollouts import ScriptedEngine


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def states(intervals: list[Interval]) -> list[tuple[int, float]]:
    return [(each.state, each.end_s - each.start_s) for each in intervals]


def test_engines_by_hand() -> None:
    clock = Clock()
    engines = EngineActivity(clock)
    for seconds, event in (
        (1.0, engines.group_began),
        (0.5, engines.request_began),
        (2.0, engines.request_began),
        (1.0, engines.request_ended),
        (1.0, engines.paused),  # the last request still ends
        (0.5, engines.request_ended),
        (3.0, engines.resumed),
        (1.5, engines.group_ended),
    ):
        clock.now_s += seconds
        event()
    clock.now_s += 0.5
    found = engines.take()
    assert states(found) == [
        (FOR_TRAINING, 1.0),
        (FOR_ENVIRONMENT, 0.5),
        (GENERATING, 4.5),
        (PAUSED, 3.0),
        (FOR_ENVIRONMENT, 1.5),
        (FOR_TRAINING, 0.5),
    ]
    step = StepActivity([Interval(WAITING, 100.0, 102.2), Interval(TRAINING, 102.2, 111.0)], found)
    assert idle_shares(step) == pytest.approx(
        {
            "rollouts/idle_share/trainer": 0.2,
            "rollouts/idle_share/engines": 6.5 / 11,
            "rollouts/idle_share/engines_for_environment": 2.0 / 11,
            "rollouts/idle_share/engines_paused": 3.0 / 11,
            "rollouts/idle_share/engines_for_training": 1.5 / 11,
        }
    )
    assert states(engines.take()) == [(FOR_TRAINING, 0.0)]


def test_a_validation_is_neither_idle_nor_part_of_the_step() -> None:
    clock = Clock()
    engines = EngineActivity(clock)
    for seconds, event in (
        (0.0, engines.request_began),
        (3.0, engines.request_ended),
        (0.0, engines.request_began),
        (30.0, engines.request_ended),
        (0.0, engines.paused),
        (1.0, engines.resumed),
    ):
        clock.now_s += seconds
        event()
    found = engines.take()
    assert states(found) == [(GENERATING, 3.0), (GENERATING, 30.0), (PAUSED, 1.0)]
    trainer = [Interval(TRAINING, 100.0, 103.0), Interval(VALIDATING, 103.0, 133.0), Interval(WAITING, 133.0, 134.0)]
    shares = idle_shares(StepActivity(trainer, found))
    assert shares["rollouts/idle_share/engines"] == shares["rollouts/idle_share/trainer"] == pytest.approx(0.25)


def test_a_step_without_length_has_no_shares() -> None:
    nothing = [Interval(FOR_TRAINING, 1.0, 1.0)]
    assert idle_shares(StepActivity(nothing, nothing)) == {}


def test_the_trainer_by_hand() -> None:
    clock = Clock()
    trainer = TrainerActivity(clock)
    for seconds, event in ((1.0, trainer.wait), (2.0, trainer.train), (4.0, trainer.update), (0.5, trainer.train)):
        clock.now_s += seconds
        event()
    assert states(trainer.take()) == [(TRAINING, 1.0), (WAITING, 2.0), (TRAINING, 4.0), (UPDATING, 0.5)]


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0.0, 10.0)), min_size=1, max_size=40), st.integers(1, 30))
def test_no_time_is_lost(changes: list[tuple[int, float]], num_bins: int) -> None:
    clock = Clock()
    recorder = StateRecorder(0, clock)
    for state, seconds in changes:
        clock.now_s += seconds
        recorder.set(state)
    clock.now_s += 1.0
    found = recorder.take()
    assert found[0].start_s == 100.0
    assert found[-1].end_s == clock.now_s
    assert all(before.end_s == after.start_s for before, after in pairwise(found))
    total = sum(seconds_of(found, state) for state in range(4))
    assert total == pytest.approx(clock.now_s - 100.0)
    bins = binned(found, num_bins)
    assert bins.shape == (num_bins,)
    assert set(bins.tolist()) <= {each.state for each in found}
    trainer = [Interval(TRAINING, found[0].start_s, found[-1].end_s)]
    shares = idle_shares(StepActivity(trainer, found))
    assert all(0 <= share <= 1 for share in shares.values())
    idle = sum(share for name, share in shares.items() if "engines_" in name)
    assert shares["rollouts/idle_share/engines"] == pytest.approx(min(idle, 1.0))
    assert shares["rollouts/idle_share/engines"] == pytest.approx(1 - seconds_of(found, GENERATING) / total)


def test_bins_take_the_state_with_most_of_their_time() -> None:
    found = [Interval(0, 0.0, 3.6), Interval(2, 3.6, 4.5), Interval(1, 4.5, 4.9), Interval(2, 4.9, 10.0)]
    assert binned(found, 5).tolist() == [0, 0, 2, 2, 2]
    assert binned(found, 10).tolist() == [0, 0, 0, 0, 2, 2, 2, 2, 2, 2]
    assert binned([Interval(1, 5.0, 5.0)], 3).tolist() == [1, 1, 1]


def test_the_last_steps_are_kept() -> None:
    recent, line = RecentSteps(), None
    for number in range(STEPS_SHOWN + 3):
        intervals = [Interval(0, float(number), number + 1.0)]
        line = recent.add(StepActivity(intervals, intervals))
    assert line is not None
    assert [step.start_s for step in line.steps] == [float(number) for number in range(3, STEPS_SHOWN + 3)]


async def test_requests_through_the_gate_are_counted() -> None:
    loop = asyncio.get_running_loop()
    activity = EngineActivity(loop.time)
    gate = EngineGate(ScriptedEngine(token_s=0.5), activity)
    request = GenerationRequest(token_ids=(1,), seed=0, sampling=SAMPLING)  # two tokens
    await asyncio.sleep(3.0)
    first = asyncio.create_task(gate.generate(request))
    await asyncio.sleep(0.25)
    await gate.close()
    held = asyncio.create_task(gate.generate(request))
    await asyncio.sleep(2.0)
    gate.open()
    found: list[GeneratedSequence] = await asyncio.gather(first, held)
    assert len(found) == 2
    assert states(activity.take()) == [
        (FOR_TRAINING, 3.0),
        (GENERATING, 1.0),
        (PAUSED, 2.0),
        (GENERATING, 1.0),
    ]
