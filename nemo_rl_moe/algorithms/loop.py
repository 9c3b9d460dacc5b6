# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What the training loops share."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from nemo_rl_moe.algorithms.loop_state import LoopState


class ScheduleConfig(Protocol):
    """The part of an algorithm's section that says how long it runs and when it validates."""

    @property
    def max_num_epochs(self) -> int: ...
    @property
    def max_num_steps(self) -> int | None: ...
    @property
    def val_period(self) -> int: ...
    @property
    def val_at_start(self) -> bool: ...
    @property
    def val_at_end(self) -> bool: ...


@dataclass(frozen=True)
class RunSummary:
    """What a run came to.

    Attributes:
        num_steps: Steps done.
        first_validation: The first validation's metrics; empty when there was none.
        last_validation: The last one's.
        last_training: The last step's training metrics.
        stopped_for: Why the run ended before its last step; None when it is complete.
    """

    num_steps: int
    first_validation: Mapping[str, float]
    last_validation: Mapping[str, float]
    last_training: Mapping[str, float]
    stopped_for: str | None

    @classmethod
    def of(cls, state: LoopState, stopped_for: str | None) -> "RunSummary":
        """Sums up a run from where it stands."""
        return cls(state.step, state.first_validation, state.last_validation, state.last_training, stopped_for)


def num_training_steps(config: ScheduleConfig, steps_per_epoch: int) -> int:
    """Steps of the whole run: the epochs' steps, or `max_num_steps` if that is less."""
    steps = config.max_num_epochs * steps_per_epoch
    return steps if config.max_num_steps is None else min(steps, config.max_num_steps)


def validation_is_due(config: ScheduleConfig, step: int, num_steps: int) -> bool:
    """Whether a validation follows this step (counted from 1)."""
    periodic = config.val_period > 0 and step % config.val_period == 0
    return periodic or (config.val_at_end and step == num_steps)
