# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Failures of the environment in a run: the first of each kind is reported, and a run without any score ends."""

from collections.abc import Callable, Sequence

from nemo_rl_moe.config.schema_environment import OnFailure
from nemo_rl_moe.errors import RewardWorkersFailedError
from nemo_rl_moe.rewards.interface import METRIC_NAMES, Fault
from nemo_rl_moe.rollouts.trajectory import OVERLONG_METRIC, Trajectory

KEY = "grpo.max_consecutive_failed_steps"
_CONSEQUENCES: dict[OnFailure, str] = {
    "leave_out": "which is not trained on",
    "lowest": "which gets the lowest reward of its group",
    "zero": "which gets reward 0",
    "retry": "which failed in its second attempt too and is not trained on",
}


class FaultWatch:
    """Watch over the trajectories of each training step and validation.

    A step or validation fails if every response that was to be scored has failed. Without `score_truncated`, truncated
    responses are not scored: they neither fail nor show that the environment works.

    Args:
        max_failed: Number of failed steps and validations in a row at which the run ends. None for no limit.
        score_truncated: Whether truncated responses are scored too.
        on_failure: `env.on_failure`.
        warn: Receives a line at the first failure of each kind, and if a step or validation fails.
        environment: Name of the environment in lines for `warn`.
    """

    def __init__(
        self,
        max_failed: int | None,
        *,
        score_truncated: bool,
        on_failure: OnFailure,
        warn: Callable[[str], None],
        environment: str = "the environment",
    ):
        self._max_failed, self._score_truncated, self._warn = max_failed, score_truncated, warn
        self._on_failure, self._environment = on_failure, environment
        self._reported: set[Fault] = set()
        self._has_reported_overlong = False
        self._failed_in_a_row = 0

    def observe(self, trajectories: Sequence[Trajectory]) -> None:
        """Check the trajectories of the next step or validation."""
        failed = [trajectory for trajectory in trajectories if trajectory.fault is not None]
        for trajectory in failed:
            self._report_first_of_its_kind(trajectory)
        self._report_first_overlong(trajectories)
        if any(self._is_scored(trajectory) for trajectory in trajectories):
            self._failed_in_a_row = 0
        elif failed:  # otherwise all were truncated
            self._failed_in_a_row += 1
            self._end_if_one_too_many(failed, len(trajectories))

    def _report_first_of_its_kind(self, trajectory: Trajectory) -> None:
        fault = trajectory.fault
        if fault is None or fault in self._reported:
            return
        self._reported.add(fault)
        self._warn(
            f"{self._environment} failed to score a response, {_CONSEQUENCES[self._on_failure]}:"
            f" {_described(trajectory)}; further ones are counted as {METRIC_NAMES[fault]}"
            f" (env.on_failure: {self._on_failure})"
        )

    def _report_first_overlong(self, trajectories: Sequence[Trajectory]) -> None:
        first = next((trajectory for trajectory in trajectories if trajectory.overlong), None)
        if first is None or self._has_reported_overlong:
            return
        self._has_reported_overlong = True
        self._warn(
            f"{first.overlong}: none of them is added, and the trajectory ends as truncated (sample"
            f" {first.sample_id}); further ones are counted as {OVERLONG_METRIC}"
        )

    def _end_if_one_too_many(self, failed: Sequence[Trajectory], num_responses: int) -> None:
        times = f", {self._failed_in_a_row} times in a row" if self._failed_in_a_row > 1 else ""
        problem = (
            f"{self._environment} scored no response of a step or validation{times}: {len(failed)} of {num_responses}"
            f" failed, the first with {_described(failed[0])}"
        )
        if self._max_failed is not None and self._failed_in_a_row >= self._max_failed:
            raise RewardWorkersFailedError(f"{problem} ({KEY}: {self._max_failed})")
        if self._failed_in_a_row == 1:
            limit = "null" if self._max_failed is None else self._max_failed
            self._warn(f"{problem}; a step without a scored response changes no weights ({KEY}: {limit})")

    def _is_scored(self, trajectory: Trajectory) -> bool:
        """Return whether the environment gave a score. A truncated response may get reward 0 without a score."""
        may_be_unscored = trajectory.is_truncated and not self._score_truncated and trajectory.reward == 0
        return trajectory.fault is None and not may_be_unscored


def _described(trajectory: Trajectory) -> str:
    return f"{trajectory.fault_message} (sample {trajectory.sample_id})"
