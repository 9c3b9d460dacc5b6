# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Objectives of the policy-gradient loss. An objective is the loss of each token before weights, averaging and
penalties.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from nemo_rl_moe.config.schema import GRPOMasterConfig
    from nemo_rl_moe.config.schema_grpo import PolicyGradientLossConfig


@dataclass(frozen=True)
class RatioBounds:
    """Bounds of the probability ratio in an objective.

    The objective replaces a ratio below `lower` or above `upper` by this bound, and its gradient by 0.
    """

    lower: Float[Tensor, "sequences targets"]
    upper: Float[Tensor, "sequences targets"]

    def clip(self, ratio: Float[Tensor, "sequences targets"]) -> Float[Tensor, "sequences targets"]:
        return ratio.clamp(self.lower, self.upper)

    def replaces(self, ratio: Float[Tensor, "sequences targets"]) -> Bool[Tensor, "sequences targets"]:
        """Return which ratios a bound replaces."""
        return (ratio < self.lower) | (ratio > self.upper)


@dataclass(frozen=True)
class ObjectiveInputs:
    """Tokens of one microbatch. All tensors have the same shape and are finite where masked.

    After the objective, the loss of a token is multiplied by its weight, averaged over the global batch and added to
    the penalties.

    Attributes:
        logprobs: Log-probability of each sampled token under the trained policy, in nats. Carries the graph.
        prev_logprobs: Log-probabilities under the policy before the step. If a step is one update and no pass computes
            them, they equal `logprobs` without the graph.
        generation_logprobs: Log-probabilities by the engine that sampled the tokens.
        reference_logprobs: Log-probabilities under the reference model, if there is one.
        ratio: `exp(logprobs - prev_logprobs)`, per sequence with `sequence_level_importance_ratios`. Carries the graph.
        weights: Importance-sampling weights, 1 without a correction.
        advantages: Advantage of each token. All tokens of a response have the same, unless the estimator distinguishes
            them.
        mask: True at tokens that count.
        global_valid_tokens: Number of tokens that count in the global batch, over all ranks.
        global_sequences: Number of sequences with such a token in the global batch.
        config: The section `loss_fn`, with bounds such as `ratio_clip_min`.
    """

    logprobs: Float[Tensor, "sequences targets"]
    prev_logprobs: Float[Tensor, "sequences targets"]
    generation_logprobs: Float[Tensor, "sequences targets"]
    reference_logprobs: Float[Tensor, "sequences targets"] | None
    ratio: Float[Tensor, "sequences targets"]
    weights: Float[Tensor, "sequences targets"]
    advantages: Float[Tensor, "sequences targets"]
    mask: Bool[Tensor, "sequences targets"]
    global_valid_tokens: int
    global_sequences: int
    config: PolicyGradientLossConfig


def no_bounds(advantages: Float[Tensor, "sequences targets"], config: PolicyGradientLossConfig) -> RatioBounds:
    """Return bounds that never clip."""
    return RatioBounds(advantages.new_zeros(advantages.shape), advantages.new_full(advantages.shape, float("inf")))


def both_bounds(advantages: Float[Tensor, "sequences targets"], config: PolicyGradientLossConfig) -> RatioBounds:
    """Return the bounds `1 - ratio_clip_min` and `1 + ratio_clip_max` for every token, whatever its advantage."""
    return RatioBounds(
        advantages.new_full(advantages.shape, 1 - config.ratio_clip_min),
        advantages.new_full(advantages.shape, 1 + config.ratio_clip_max),
    )


def surrogate_bounds(advantages: Float[Tensor, "sequences targets"], config: PolicyGradientLossConfig) -> RatioBounds:
    """Return the effective bounds of the clipped surrogate, which depend on the sign of the advantage.

    PPO's `min(ratio * A, clip(ratio) * A)` (arXiv:1707.06347, eq. 7) only clips a ratio that has moved in the direction
    of the advantage. So there is only an upper bound for `A > 0`, and a lower bound for `A < 0`. Dual clip's
    `max(..., c * A)` for `A < 0` (arXiv:1912.09729) adds the upper bound `c`. With `A = 0` nothing is clipped.
    """
    both = both_bounds(advantages, config)
    upper_if_negative = float("inf") if config.ratio_clip_c is None else config.ratio_clip_c
    return RatioBounds(
        lower=both.lower.where(advantages < 0, 0.0),
        upper=both.upper.where(advantages > 0, float("inf")).masked_fill(advantages < 0, upper_if_negative),
    )


def clipped(inputs: ObjectiveInputs) -> Float[Tensor, "sequences targets"]:
    """Return `-clip(ratio) * A` (PPO, arXiv:1707.06347, eq. 7). A clipped token has no gradient."""
    return -surrogate_bounds(inputs.advantages, inputs.config).clip(inputs.ratio) * inputs.advantages


def cispo(inputs: ObjectiveInputs) -> Float[Tensor, "sequences targets"]:
    """Return `-clip(ratio) * A * logprob`. The clipped ratio has no gradient (CISPO of MiniMax-M1, arXiv:2506.13585).

    Every token keeps its gradient. There is no dual clip.
    """
    ratio = both_bounds(inputs.advantages, inputs.config).clip(inputs.ratio)
    return -ratio.detach() * inputs.advantages * inputs.logprobs


def reinforce(inputs: ObjectiveInputs) -> Float[Tensor, "sequences targets"]:
    """Return `-A * logprob`, without a ratio (REINFORCE, Williams 1992).

    If a step is one update, the gradient equals that of the other objectives.
    """
    return -inputs.advantages * inputs.logprobs


@dataclass(frozen=True)
class Objective:
    """An objective of the policy-gradient loss.

    Attributes:
        name: Name in `loss_fn.objective`.
        function: Function that returns the loss of each token.
        bounds: Function that returns the bounds of the ratio, for the metrics of clipping.
        unread: Key in `SWITCHES` that the objective does not read -> reason in the error message.
    """

    name: str
    function: Callable[[ObjectiveInputs], Float[Tensor, "sequences targets"]]
    bounds: Callable[[Float[Tensor, "sequences targets"], PolicyGradientLossConfig], RatioBounds] = no_bounds
    unread: Mapping[str, str] = field(default_factory=dict)


SWITCHES: Mapping[str, bool | None] = {"ratio_clip_c": None, "sequence_level_importance_ratios": False}
"""Key of `loss_fn` that only some objectives read -> its value with other objectives."""

OBJECTIVES: dict[str, Objective] = {
    objective.name: objective
    for objective in (
        Objective("clipped", clipped, surrogate_bounds),
        Objective(
            "cispo",
            cispo,
            both_bounds,
            {"ratio_clip_c": "", "sequence_level_importance_ratios": ", which weighs each token by its own ratio"},
        ),
        Objective(
            "reinforce",
            reinforce,
            unread={"ratio_clip_c": "", "sequence_level_importance_ratios": ", which has no ratio"},
        ),
    )
}
"""Objectives by their name in `loss_fn.objective`. To add one, write a function and a record."""


def objective_reads_its_settings(config: GRPOMasterConfig) -> Iterator[str]:
    """Check that the objective reads each changed setting in `SWITCHES`."""
    loss = config.loss_fn
    objective = OBJECTIVES.get(loss.objective)
    for key, reason in objective.unread.items() if objective is not None else ():
        value, off = getattr(loss, key), SWITCHES[key]
        if value != off:
            got, expected = ("null" if word is None else str(word).lower() for word in (value, off))
            yield f"loss_fn.{key}: got {got}, expected {expected} with loss_fn.objective {loss.objective}{reason}"
