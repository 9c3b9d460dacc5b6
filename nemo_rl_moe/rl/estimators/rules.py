# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rules that every estimator's record gives. Rules of a single estimator are in its module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from nemo_rl_moe.rl.estimators import ESTIMATORS
from nemo_rl_moe.rl.estimators.interface import SWITCHES
from nemo_rl_moe.rl.objectives.rules import tokens_have_their_own_ratio

if TYPE_CHECKING:
    from nemo_rl_moe.config.schema import GRPOMasterConfig

KEY = "grpo.adv_estimator"


def responses_have_others_to_be_compared_with(config: GRPOMasterConfig) -> Iterator[str]:
    """Check that the estimator needs no groups if each prompt has one response."""
    loop, estimator = config.grpo, ESTIMATORS.get(config.grpo.adv_estimator.name)
    if loop.num_generations_per_prompt > 1:
        return
    if estimator is not None and estimator.baseline == "group":
        others = [other.name for other in ESTIMATORS.values() if other.baseline != "group"]
        yield (
            f"grpo.num_generations_per_prompt: got 1, expected 2 or more with {KEY}.name {estimator.name}, which"
            f" compares the responses to one prompt; {_listed(others)} take 1"
        )
        return
    if loop.num_prompts_per_step == 1 and estimator is not None and estimator.baseline == "step":
        yield (
            "grpo.num_prompts_per_step: got 1, expected 2 or more with grpo.num_generations_per_prompt 1: a response"
            " is compared with the other responses of its step"
        )
    if loop.use_dynamic_sampling:
        yield (
            "grpo.use_dynamic_sampling: got true, expected false with grpo.num_generations_per_prompt 1: the rewards"
            " of a group of one are always all equal"
        )


def equal_rewards_teach_nothing(config: GRPOMasterConfig) -> Iterator[str]:
    """Check that groups with equal rewards have no advantages if they are excluded from the loss."""
    estimator = ESTIMATORS.get(config.grpo.adv_estimator.name)
    if config.grpo.zero_variance_filtering and estimator is not None and estimator.baseline != "group":
        yield (
            f"grpo.zero_variance_filtering: got true, expected false with {KEY}.name {estimator.name}, which has"
            " advantages for a group of equal rewards too"
        )


def advantages_reach_their_tokens(config: GRPOMasterConfig) -> Iterator[str]:
    """Check that tokens with different advantages have different ratios."""
    estimator = ESTIMATORS.get(config.grpo.adv_estimator.name)
    if estimator is not None and estimator.of_tokens:
        yield from tokens_have_their_own_ratio(config)


def estimator_reads_its_settings(config: GRPOMasterConfig) -> Iterator[str]:
    """Check that the estimator reads each changed setting in `SWITCHES`, and check the estimator's own rules."""
    chosen = config.grpo.adv_estimator
    estimator = ESTIMATORS.get(chosen.name)
    if estimator is None:  # a custom function may read all of them
        return
    for key, off in SWITCHES.items():
        value: bool | str = getattr(chosen, key)
        if value != off and key not in estimator.reads:
            readers = [other.name for other in ESTIMATORS.values() if key in other.reads]
            yield (
                f"{KEY}.{key}: got {_word(value)}, expected {_word(off)} with {KEY}.name {estimator.name}, which does"
                f" not read it; {_listed(readers)} {'does' if len(readers) == 1 else 'do'}"
            )
    for rule in estimator.rules:
        yield from rule(config)


def _listed(names: list[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _word(value: bool | str) -> str:
    return value if isinstance(value, str) else str(value).lower()


ESTIMATOR_RULES = (
    responses_have_others_to_be_compared_with,
    equal_rewards_teach_nothing,
    advantages_reach_their_tokens,
    estimator_reads_its_settings,
)
