# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Signs of a broken reward function: responses that it fails to score, and rewards that never vary."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

RewardKind = Literal["failed_responses", "constant_reward"]
_TOTAL, _NAMED, _MEAN = "the reward", "train/rewards/", "/mean"
_ROUNDING = 1e-9
"""Largest difference of rewards that count as equal, relative to the larger of 1 and the reward."""


@dataclass(frozen=True)
class FailedResponses:
    split: str
    number: int
    responses: int
    first: str

    @property
    def share(self) -> float:
        return self.number / self.responses


def is_reward_metric(key: str) -> bool:
    """Return whether `RewardSignal` reads a metric."""
    return key in ("train/reward", "train/reward_std") or key.startswith("train/rewards/")


class RewardSignal:
    """Detects responses that cannot be scored, and rewards that never vary. Steps are added in order."""

    def __init__(self, failed_share: float | None, num_steps: int | None, quiet_steps: int):
        self._failed_share, self._num_steps, self._quiet_steps = failed_share, num_steps, quiet_steps
        self._first_step: int | None = None
        self._history: dict[str, _History] = {}
        self._failed_at: tuple[int, int] | None = None
        self._first_cause = ""

    def observe(
        self, step: int, metrics: Mapping[str, float], failed: Sequence[FailedResponses] = ()
    ) -> Iterator[tuple[RewardKind, int, str]]:
        """Add a step. Yield (kind, first step, description) for each condition that holds at this step.

        The first step is earlier if the condition has held before.
        """
        if self._failed_share is not None:
            sick = [found for found in failed if found.share > self._failed_share]
            if sick:
                yield self._failures(step, max(sick, key=lambda found: found.share))
        if self._num_steps is not None:
            yield from self._constant_rewards(step, metrics, self._num_steps)

    def _failures(self, step: int, found: FailedResponses) -> tuple[RewardKind, int, str]:
        if self._failed_at is None or step - self._failed_at[1] - 1 > self._quiet_steps:
            self._failed_at, self._first_cause = (step, step), found.first
        since = self._failed_at[0]
        self._failed_at = since, step
        of = "responses" if found.split == "train" else "responses of the validation"
        cause = f": {self._first_cause}" if since == step else f"; the first at step {since}: {self._first_cause}"
        text = f"{found.number} of {found.responses} {of} ({found.share:.0%}) could not be scored at step {step}{cause}"
        return "failed_responses", since, text

    def _constant_rewards(
        self, step: int, metrics: Mapping[str, float], num_steps: int
    ) -> Iterator[tuple[RewardKind, int, str]]:
        if self._first_step is None:
            self._first_step = step
        if self._first_step > 1:
            return  # a resumed run, whose earlier rewards are unknown
        # A constant total reward is reported as a step without advantages.
        reported_elsewhere = metrics.get("train/advantages/min") == metrics.get("train/advantages/max") == 0
        found = []
        for name, mean, deviation in _rewards(metrics):
            history = self._history.setdefault(name, _History(mean))
            history.observe(mean, deviation)
            if not history.varies and history.steps >= num_steps and not (name == _TOTAL and reported_elsewhere):
                found.append(f"{name} has been {mean:.4g}")
        if found:
            text = f"{', '.join(found)} in every response since step {self._first_step}: it distinguishes no responses"
            yield "constant_reward", self._first_step, text


def _rewards(metrics: Mapping[str, float]) -> Iterator[tuple[str, float, float]]:
    """Yield (name, mean, standard deviation) of the total reward and of each named reward."""
    if "train/reward" in metrics:
        yield _TOTAL, metrics["train/reward"], metrics.get("train/reward_std", math.nan)
    for key, mean in metrics.items():
        if key.startswith(_NAMED) and key.endswith(_MEAN):
            name = key.removeprefix(_NAMED).removesuffix(_MEAN)
            yield f"the reward {name!r}", mean, metrics.get(f"{_NAMED}{name}/std", math.nan)


@dataclass
class _History:
    """Whether one reward has varied so far, within a step or between steps."""

    value: float
    steps: int = 0
    varies: bool = False

    def observe(self, mean: float, deviation: float) -> None:
        bound = _ROUNDING * max(1.0, abs(mean))
        self.varies |= not (abs(mean - self.value) <= bound and deviation <= bound)  # in this form, NaN varies
        self.steps += 1
