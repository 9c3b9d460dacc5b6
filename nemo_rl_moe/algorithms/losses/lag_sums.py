# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Sums of a policy-gradient loss over the tokens of each class of lag, for metrics by lag."""

from enum import StrEnum

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from nemo_rl_moe.algorithms.losses.divergence import kl_estimate
from nemo_rl_moe.algorithms.losses.policy_metrics import Metrics, class_sums
from nemo_rl_moe.algorithms.losses.ratios import importance_ratio
from nemo_rl_moe.metrics import Reduction
from nemo_rl_moe.models.interfaces import LossInputs
from nemo_rl_moe.token_lag import LAG_CLASSES, NO_LAG, TOKEN_LAG, lag_classes


class LagSum(StrEnum):
    """Quantity that the loss sums over the tokens of each class of lag, for metrics by lag."""

    TOKENS = "tokens"
    LAG = "lag"
    DIFFERENCE = "difference"
    """`|log training - log generation|`."""
    DIVERGENCE = "divergence"
    """k3 estimate of `KL(generation || training)`."""
    WEIGHT = "weight"
    """Importance ratio of training to generation, before any correction."""
    SQUARED_WEIGHT = "squared_weight"
    CLIPPED = "clipped"
    """1 if the objective replaces the probability ratio by a bound."""


def sum_key(lag_class: str, quantity: LagSum) -> str:
    """Return the name of a sum among the metrics of a loss."""
    return f"by_lag/{lag_class}/sum_{quantity}"


def lag_sums(
    prev: Float[Tensor, "sequences targets"],
    generation: Float[Tensor, "sequences targets"],
    is_clipped: Bool[Tensor, "sequences targets"],
    inputs: LossInputs,
    *,
    is_bounded: bool,
) -> Metrics:
    """Return the sums over the tokens of each class of lag (optimizer steps since sampling), and the largest lag.

    If the loss does not bound the weight of older tokens, the largest lag is also returned as `max_unbounded_lag`. The
    result is empty if the batch has no lags.

    Args:
        prev: Log-probabilities of the policy before the step. Masked ones must be finite.
        generation: Log-probabilities by the engine that sampled the tokens. Masked ones must be finite.
        is_clipped: Whether the objective replaces a token's ratio by a bound.
        is_bounded: Whether the loss bounds the weight of tokens that older weights sampled.
    """
    if TOKEN_LAG not in inputs.columns:
        return {}
    lags = inputs.per_target(TOKEN_LAG).where(inputs.token_mask, NO_LAG)
    ratio = importance_ratio(prev, generation)
    of_tokens = {
        LagSum.TOKENS: torch.ones_like(ratio),
        LagSum.LAG: lags,
        LagSum.DIFFERENCE: (prev - generation).abs(),
        LagSum.DIVERGENCE: kl_estimate(generation, prev, "k3"),
        LagSum.WEIGHT: ratio,
        LagSum.SQUARED_WEIGHT: ratio.square(),
        LagSum.CLIPPED: is_clipped,
    }
    metrics: Metrics = {"by_lag/max_lag": (lags.amax(), Reduction.MAX)}
    if not is_bounded:
        metrics["by_lag/max_unbounded_lag"] = metrics["by_lag/max_lag"]
    return metrics | class_sums(LAG_CLASSES, lag_classes(lags), of_tokens, sum_key)
