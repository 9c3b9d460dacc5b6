# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Reward function of an environment whose rewards come from a reward model alone."""

from collections.abc import Sequence

from nemo_rl_moe.rewards.interface import Score, ScoringItem


class LeftToTheModel:
    """Reward function that returns 0 for each response. The reward model's score is added later. No response counts as
    right."""

    def score(self, items: Sequence[ScoringItem]) -> list[Score]:
        return [Score(0.0, is_correct=False) for _ in items]
