# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rules that every objective's record gives. Rules of a single objective are in its module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from nemo_rl_moe.rl.objectives import OBJECTIVES
from nemo_rl_moe.rl.objectives.interface import SWITCHES

if TYPE_CHECKING:
    from nemo_rl_moe.config.schema import GRPOMasterConfig


def objective_reads_its_settings(config: GRPOMasterConfig) -> Iterator[str]:
    """Check that the objective reads each changed setting in `SWITCHES`, and check the objective's own rules."""
    loss = config.loss_fn
    objective = OBJECTIVES.get(loss.objective)
    if objective is None:  # a custom function may read all of them
        return
    for key, reason in objective.unread.items():
        value, off = getattr(loss, key), SWITCHES[key]
        if value != off:
            got, expected = ("null" if word is None else str(word).lower() for word in (value, off))
            yield f"loss_fn.{key}: got {got}, expected {expected} with loss_fn.objective {loss.objective}{reason}"
    for rule in objective.rules:
        yield from rule(config)


def tokens_have_their_own_ratio(config: GRPOMasterConfig) -> Iterator[str]:
    """Check that tokens of a sequence do not share a ratio, for an estimator that gives them different advantages."""
    loss = config.loss_fn
    objective = OBJECTIVES.get(loss.objective)
    if objective is None:  # a custom function may use the ratio of each token
        return
    reason = (
        f"with grpo.adv_estimator.name {config.grpo.adv_estimator.name}, which gives an advantage to each token: one"
        " ratio for a sequence would train all its tokens on their mean advantage"
    )
    if objective.of_sequences:
        expected = "one with a ratio for each token, such as clipped,"
        yield f"loss_fn.objective: got {objective.name}, expected {expected} {reason}"
    elif loss.sequence_level_importance_ratios:
        yield f"loss_fn.sequence_level_importance_ratios: got true, expected false {reason}"
