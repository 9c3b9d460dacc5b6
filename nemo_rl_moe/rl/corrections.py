# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Importance-sampling corrections: weights for the mismatch of training and generation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from nemo_rl_moe.config.schema import GRPOMasterConfig
    from nemo_rl_moe.config.schema_grpo import PolicyGradientLossConfig


def out_of_bounds(ratio: Float[Tensor, "*shape"], config: PolicyGradientLossConfig) -> Bool[Tensor, "*shape"]:
    """Return which tokens the correction truncates or drops."""
    return (ratio > config.importance_sampling_ratio_max) | (ratio < config.importance_sampling_lower_bound)


def no_weights(
    ratio: Float[Tensor, "*shape"], bounded: Float[Tensor, "*shape"], config: PolicyGradientLossConfig
) -> Float[Tensor, "*shape"]:
    """Return 1 for every token."""
    return ratio.new_ones(ratio.shape)


def truncated(
    ratio: Float[Tensor, "*shape"], bounded: Float[Tensor, "*shape"], config: PolicyGradientLossConfig
) -> Float[Tensor, "*shape"]:
    """Return the ratio clamped to the bounds: truncated importance sampling.

    F. Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025, where the lower bound
    is 0.
    """
    return ratio.clamp(config.importance_sampling_lower_bound, config.importance_sampling_ratio_max)


def masked(
    ratio: Float[Tensor, "*shape"], bounded: Float[Tensor, "*shape"], config: PolicyGradientLossConfig
) -> Float[Tensor, "*shape"]:
    """Return the ratio if it is within the inclusive bounds. Otherwise return 0, which drops the token.

    For single tokens: X. Zhao et al., "Small Leak Can Sink a Great Ship: Boost RL Training on MoE with IcePop", 2025.
    For sequences, by the geometric mean of their ratios: J. Liu, Y. Li et al., "When Speed Kills Stability:
    Demystifying RL Collapse from the Training-Inference Mismatch", 2025.
    """
    return ratio.where(~out_of_bounds(bounded, config), 0.0)


@dataclass(frozen=True)
class Correction:
    """An importance-sampling correction.

    Attributes:
        name: Name in `loss_fn.importance_sampling_correction`.
        weights: Function that returns the weight of each token, from its ratio, the ratio that is compared with the
            bounds, and the section `loss_fn`.
        effect: What happens to tokens out of bounds. It is a part of the name of the metric
            `importance_weight_{effect}_fraction`. None means a correction without bounds.
        bounds_geometric_mean: Whether the bounds are compared with the geometric mean of the ratios of a sequence's
            tokens. If False, they are compared with the ratio of the token or sequence that
            `importance_sampling_level` selects.
        lower_bound: Bound if `importance_sampling_ratio_min` is null. If it is None, the setting must be a number.
    """

    name: str
    weights: Callable[
        [Float[Tensor, "*shape"], Float[Tensor, "*shape"], PolicyGradientLossConfig], Float[Tensor, "*shape"]
    ]
    effect: Literal["truncated", "dropped"] | None
    bounds_geometric_mean: bool = False
    lower_bound: float | None = 0.0

    @property
    def reads_level(self) -> bool:
        """Whether `importance_sampling_level` chooses between ratios of tokens and of sequences."""
        return self.effect is not None and not self.bounds_geometric_mean


CORRECTIONS: dict[str, Correction] = {
    correction.name: correction
    for correction in (
        Correction("none", no_weights, effect=None),
        Correction("truncated", truncated, "truncated"),
        Correction("icepop", masked, "dropped", lower_bound=0.5),
        Correction("sequence_mask", masked, "dropped", bounds_geometric_mean=True, lower_bound=None),
    )
}
"""Corrections by their name in `loss_fn.importance_sampling_correction`. To add one, write a function and a record."""


def bounds_old_tokens(config: PolicyGradientLossConfig) -> bool:
    """Return whether the correction bounds the importance weights of tokens that an older policy sampled.

    Without such a correction, these importance weights are only bounded if the objective clips its ratio and computes
    it relative to the policy that sampled the tokens.
    """
    return CORRECTIONS[config.importance_sampling_correction].effect is not None


def importance_bounds_are_in_order(config: GRPOMasterConfig) -> Iterator[str]:
    """Check that the bounds are in order, and that the lower bound is given if it has no default."""
    loss = config.loss_fn
    correction = CORRECTIONS[loss.importance_sampling_correction]
    lower, upper = loss.importance_sampling_lower_bound, loss.importance_sampling_ratio_max
    if correction.lower_bound is None and loss.importance_sampling_ratio_min is None:
        yield (
            "loss_fn.importance_sampling_ratio_min: got null, expected a number with"
            f" loss_fn.importance_sampling_correction {correction.name}, such as 0.999 with a"
            " loss_fn.importance_sampling_ratio_max of 1.002"
        )
    elif correction.effect is not None and lower >= upper:
        yield (
            f"loss_fn.importance_sampling_ratio_min: got {lower}, expected less than"
            f" loss_fn.importance_sampling_ratio_max = {upper}"
        )


def importance_of_sequences_is_read(config: GRPOMasterConfig) -> Iterator[str]:
    """Check that the correction uses ratios of sequences if these are configured."""
    loss = config.loss_fn
    name = loss.importance_sampling_correction
    if loss.importance_sampling_level == "sequence" and not CORRECTIONS[name].reads_level:
        readers = " and ".join(other.name for other in CORRECTIONS.values() if other.reads_level)
        yield (
            "loss_fn.importance_sampling_level: got sequence, expected token with"
            f" loss_fn.importance_sampling_correction {name}, which does not read it; {readers} do"
        )


CORRECTION_RULES = (importance_bounds_are_in_order, importance_of_sequences_is_read)
