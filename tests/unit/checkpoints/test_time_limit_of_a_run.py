# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A run with a time limit stops before a step that would end too late."""

from collections.abc import Sequence

from nemo_rl_moe.checkpoints.time_limit import TimeLimit


def steps_until_stopped(
    must_save_by: str | None, durations: Sequence[float], started: float | None = None, savings: Sequence[float] = ()
) -> int:
    """After how many steps of these durations the run stops; 0: it does not."""
    now = 1000.0
    limit = TimeLimit(must_save_by, started, clock=lambda: now)
    for seconds in savings:
        limit.note_saving(seconds)
    for step, duration in enumerate(durations, start=1):
        now += duration
        if limit.is_up_after_step():
            return step
    return 0


def test_it_stops_when_the_next_step_would_end_too_late() -> None:
    # 60 s: after 5 steps of 10 s another one would end at 60.
    assert steps_until_stopped("00:00:01:00", [10.0] * 9) == 5
    # One of the last steps took 20 s: after 40 s another such one would end at 60.
    assert steps_until_stopped("00:00:01:00", [10.0, 20.0, 5.0, 5.0, 5.0]) == 4
    # A long step, such as one with a validation, may come again at any time: 20 + 20 + 20 = 60.
    assert steps_until_stopped("00:00:01:00", [20.0, *[1.0] * 40]) == 1 + 20
    assert steps_until_stopped("00:00:01:00", [500.0]) == 1


def test_time_for_saving_is_left() -> None:
    # 20 s of steps, then 10 s for another step and 30 s for the slowest save.
    assert steps_until_stopped("00:00:01:00", [10.0] * 9, savings=[5.0, 30.0, 1.0]) == 2


def test_time_counts_from_the_start_of_the_run() -> None:
    assert steps_until_stopped("00:00:01:00", [10.0] * 9, started=970.0) == 2


def test_without_a_limit_it_never_stops() -> None:
    assert steps_until_stopped(None, [1e9] * 3) == 0
