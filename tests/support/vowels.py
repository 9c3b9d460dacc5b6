# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A reward in a module that is quickly imported."""

from nemo_rl_moe.rewards.interface import ScoringItem


def share_of_vowels(item: ScoringItem) -> float:
    """Reward of which most groups have a spread."""
    return sum(letter in "aeiou" for letter in item.response) / max(1, len(item.response))
