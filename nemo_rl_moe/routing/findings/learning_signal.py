# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Steps of reinforcement learning that teach little: no advantages, or responses truncated and not scored."""

from collections.abc import Iterator, Mapping
from typing import Literal

IdleKind = Literal["no_advantages", "all_truncated", "unscored_responses"]
_UNSCORED = "train/truncation_rate_unscored"
METRICS = (
    "train/advantages/min",
    "train/advantages/max",
    "train/reward",
    "train/reward_std",
    "train/truncation_rate",
    _UNSCORED,
)
"""Keys that `LearningSignal` reads."""
MOST_UNSCORED = 0.5
"""Share of a step's responses that may get reward 0 unscored: above it the reward function sees less than half."""


class LearningSignal:
    def __init__(self, num_steps: int | None):
        self._num_steps = num_steps
        self._since: dict[IdleKind, tuple[int, int]] = {}

    def observe(self, step: int, metrics: Mapping[str, float]) -> Iterator[tuple[IdleKind, int, str]]:
        """Yield the condition, first step and description of each streak that is long enough with the next step."""
        if self._num_steps is None:
            return
        reward = metrics.get("train/reward")
        which = "all" if metrics.get("train/reward_std") == 0 else "mean"
        mean = "" if reward is None else f" ({which} {reward:.4g})"
        unscored = metrics.get(_UNSCORED, 0.0)
        texts: dict[IdleKind, str] = {
            "no_advantages": f"every advantage has been 0 since step {{}}: rewards that are compared are equal{mean},"
            " and teach nothing",
            "all_truncated": "every response has been truncated at the length limit since step {}",
            "unscored_responses": f"{unscored:.0%} of the responses were truncated and got reward 0 without being"
            " scored, and more than half have been since step {}: env.score_truncated is false; true scores them, and a"
            " larger policy.generation.max_new_tokens truncates fewer",
        }
        is_so: dict[IdleKind, bool] = {
            "no_advantages": metrics.get("train/advantages/min") == metrics.get("train/advantages/max") == 0,
            "all_truncated": metrics.get("train/truncation_rate") == 1,
            "unscored_responses": unscored > MOST_UNSCORED,
        }
        for kind, text in texts.items():
            if not is_so[kind]:
                self._since.pop(kind, None)
                continue
            first, length = self._since.get(kind, (step, 0))
            self._since[kind] = first, length + 1
            if length + 1 >= (1 if kind == "unscored_responses" else self._num_steps):
                yield kind, first, text.format(first)
