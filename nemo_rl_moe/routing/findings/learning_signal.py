# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Steps of reinforcement learning that teach little: all advantages are 0, or responses are truncated or not scored."""

from collections.abc import Iterator, Mapping
from typing import Literal

from nemo_rl_moe.routing.findings.streaks import Streaks

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
"""Largest share of a step's responses that may get reward 0 without being scored."""


class LearningSignal:
    def __init__(self, num_steps: int | None):
        self._num_steps = num_steps
        self._streaks: Streaks[IdleKind] = Streaks()

    def observe(self, step: int, metrics: Mapping[str, float]) -> Iterator[tuple[IdleKind, int, str]]:
        """Add a step. Yield (condition, its first step, description) for each condition that has held long enough."""
        if self._num_steps is None:
            return
        reward = metrics.get("train/reward")
        which = "all" if metrics.get("train/reward_std") == 0 else "mean"
        mean = "" if reward is None else f" ({which} {reward:.4g})"
        unscored = metrics.get(_UNSCORED, 0.0)
        texts: dict[IdleKind, str] = {}
        if metrics.get("train/advantages/min") == metrics.get("train/advantages/max") == 0:
            texts["no_advantages"] = (
                f"every advantage has been 0 since step {{}}: rewards that are compared are equal{mean},"
                " and teach nothing"
            )
        if metrics.get("train/truncation_rate") == 1:
            texts["all_truncated"] = "every response has been truncated at the length limit since step {}"
        if unscored > MOST_UNSCORED:
            texts["unscored_responses"] = (
                f"{unscored:.0%} of the responses were truncated and got reward 0 without being scored, and more than"
                " half have been since step {}: env.score_truncated is false; true scores them, and a larger"
                " policy.generation.max_new_tokens truncates fewer"
            )
        for kind, first, length in self._streaks.extend(step, texts):
            if kind == "unscored_responses" or length >= self._num_steps:
                yield kind, first, texts[kind].format(first)
