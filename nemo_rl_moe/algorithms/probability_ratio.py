# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The ratio of the probabilities that two policies give a token, and the bounds that an objective holds it in."""

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from nemo_rl_moe.config.schema_grpo import PolicyGradientLossConfig

LARGEST_LOG_RATIO = 20.0
"""What `bounded_exp` takes a larger exponent for: e^20 is half a billion, and float32 ends at e^88."""


def bounded_exp(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """`exp`, but no larger than `exp(LARGEST_LOG_RATIO)`, beyond which its gradient is 0.

    One token that a policy has all but ruled out would make a float32 mean infinite, or its gradient `inf * 0`. No
    training goes on through a ratio of half a billion; clips and truncations act far below.
    """
    return log_ratio.clamp(max=LARGEST_LOG_RATIO).exp()


def sequence_mean(
    values: Float[Tensor, "sequences targets"], mask: Bool[Tensor, "sequences targets"]
) -> Float[Tensor, "sequences 1"]:
    """Each sequence's mean over its valid tokens; 0 where it has none."""
    return values.where(mask, 0.0).sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)


def probability_ratio(
    logprobs: Float[Tensor, "sequences targets"],
    prev_logprobs: Float[Tensor, "sequences targets"],
    mask: Bool[Tensor, "sequences targets"],
    *,
    of_sequences: bool,
) -> Float[Tensor, "sequences targets"]:
    """How much more likely the policy makes each token than it did before this step.

    Args:
        logprobs: Of the policy that is trained; finite where masked.
        prev_logprobs: Of the policy before the step; finite where masked.
        mask: Valid tokens.
        of_sequences: Give all tokens of a sequence `y` the ratio `(pi(y) / pi_prev(y)) ** (1 / |y|)`, the exponential
            of its mean log-ratio (GSPO, arXiv:2507.18071, eq. 7), whose gradient reaches every token of it.
    """
    log_ratio = logprobs - prev_logprobs
    if of_sequences:
        log_ratio = sequence_mean(log_ratio, mask).expand_as(log_ratio)
    return bounded_exp(log_ratio)


@dataclass(frozen=True)
class RatioBounds:
    """What the objective holds each ratio between.

    Attributes:
        lower: Where a ratio is below, the objective takes this for it, and its gradient is 0.
        upper: The same above.
    """

    lower: Float[Tensor, "sequences targets"]
    upper: Float[Tensor, "sequences targets"]

    def clip(self, ratio: Float[Tensor, "sequences targets"]) -> Float[Tensor, "sequences targets"]:
        """The ratio, held between the bounds."""
        return ratio.clamp(self.lower, self.upper)


def both_bounds(like: Float[Tensor, "sequences targets"], config: PolicyGradientLossConfig) -> RatioBounds:
    """`1 - ratio_clip_min` and `1 + ratio_clip_max` for every token, whatever its advantage."""
    return RatioBounds(
        like.new_full(like.shape, 1 - config.ratio_clip_min), like.new_full(like.shape, 1 + config.ratio_clip_max)
    )


def surrogate_bounds(advantages: Float[Tensor, "sequences targets"], config: PolicyGradientLossConfig) -> RatioBounds:
    """The bounds that the clipped surrogate comes to, given the sign of the advantage.

    PPO's `min(ratio * A, clip(ratio) * A)` (arXiv:1707.06347, eq. 7) only ever clips a ratio that has moved the way the
    advantage points: from above where `A > 0`, from below where `A < 0`. Dual clip's `max(..., c * A)` for `A < 0`
    (arXiv:1912.09729) is an upper bound of `c`. Where `A = 0` nothing is clipped.
    """
    both = both_bounds(advantages, config)
    upper_if_negative = float("inf") if config.ratio_clip_c is None else config.ratio_clip_c
    return RatioBounds(
        lower=both.lower.where(advantages < 0, 0.0),
        upper=both.upper.where(advantages > 0, float("inf")).masked_fill(advantages < 0, upper_if_negative),
    )
