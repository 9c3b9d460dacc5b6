# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Activity of trainer and engines in asynchronous rollouts: when they worked, and why they waited."""

import time
from collections import deque
from collections.abc import Callable

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
    TimeLine,
    seconds_of,
)

STEPS_SHOWN = 8
"""Number of steps in a time line."""


class StateRecorder:
    """Recorder of the states of an engine or trainer, as consecutive intervals of time.

    Args:
        state: The first state.
        clock: Returns seconds of a monotonic clock.
    """

    def __init__(self, state: int, clock: Callable[[], float]):
        self._state, self._clock = state, clock
        self._since_s = clock()
        self._intervals: list[Interval] = []

    def set(self, state: int) -> None:
        if state != self._state:
            self._end()
            self._state = state

    def take(self) -> list[Interval]:
        """Return the intervals since the last call, at least one, and remove them from the recorder."""
        self._end()
        found, self._intervals = self._intervals, []
        return found or [Interval(self._state, self._since_s, self._since_s)]

    def _end(self) -> None:
        now_s = self._clock()
        if now_s > self._since_s:
            self._intervals.append(Interval(self._state, self._since_s, now_s))
            self._since_s = now_s


class EngineActivity:
    """State of all engines together, used in the thread of the rollouts.

    The engines generate while one of them has a request. Otherwise they are paused (requests are held back until new
    weights arrive), or they wait. They wait for the environment (its code, tools and rewards) while groups are open,
    and for training if no group may begin.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.clock = clock
        self._recorder = StateRecorder(FOR_TRAINING, clock)
        self._num_requests = self._num_groups = 0
        self._is_paused = False

    def request_began(self) -> None:
        self._num_requests += 1
        self._note()

    def request_ended(self) -> None:
        self._num_requests -= 1
        self._note()

    def group_began(self) -> None:
        self._num_groups += 1
        self._note()

    def group_ended(self) -> None:
        self._num_groups -= 1
        self._note()

    def paused(self) -> None:
        self._is_paused = True
        self._note()

    def resumed(self) -> None:
        self._is_paused = False
        self._note()

    def take(self) -> list[Interval]:
        return self._recorder.take()

    def _note(self) -> None:
        if self._num_requests:
            self._recorder.set(GENERATING)
        elif self._is_paused:
            self._recorder.set(PAUSED)
        else:
            self._recorder.set(FOR_ENVIRONMENT if self._num_groups else FOR_TRAINING)


class TrainerActivity:
    """State of the trainer, used in its thread: it waits for rollouts, updates engines, validates, or else trains."""

    def __init__(self, clock: Callable[[], float]):
        self._recorder = StateRecorder(TRAINING, clock)

    def wait(self) -> None:
        self._recorder.set(WAITING)

    def update(self) -> None:
        self._recorder.set(UPDATING)

    def validate(self) -> None:
        self._recorder.set(VALIDATING)

    def train(self) -> None:
        self._recorder.set(TRAINING)

    def take(self) -> list[Interval]:
        return self._recorder.take()


class RecentSteps:
    """Activity of the last steps."""

    def __init__(self) -> None:
        self._steps: deque[StepActivity] = deque(maxlen=STEPS_SHOWN)

    def add(self, step: StepActivity) -> TimeLine:
        """Add a step, and return the time line that ends with it."""
        self._steps.append(step)
        return TimeLine(tuple(self._steps))


def idle_shares(step: StepActivity) -> dict[str, float]:
    """Return the shares of waiting time in the time of a step without validation. Empty if this time is 0.

    - `rollouts/idle_share/trainer`: training waits for rollouts
    - `rollouts/idle_share/engines`: no engine has a request. It is the sum of `engines_for_environment`,
      `engines_paused` and `engines_for_training`
    """
    seconds = step.seconds - seconds_of(step.trainer, VALIDATING)
    if seconds <= 0:
        return {}
    parts = {
        "engines_for_environment": FOR_ENVIRONMENT,
        "engines_paused": PAUSED,
        "engines_for_training": FOR_TRAINING,
    }
    shares = {name: seconds_of(step.engines, state) / seconds for name, state in parts.items()}
    trainer = seconds_of(step.trainer, WAITING) / seconds
    found = {"trainer": trainer, "engines": sum(shares.values()), **shares}
    return {f"rollouts/idle_share/{name}": min(share, 1.0) for name, share in found.items()}
