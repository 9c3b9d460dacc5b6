# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Objectives of the policy-gradient loss: the loss of each token, before weights, averaging and penalties."""

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

    Attributes:
        lower: Below it the objective takes this for the ratio, and its gradient is 0.
        upper: Above it likewise.
    """

    lower: Float[Tensor, "sequences targets"]
    upper: Float[Tensor, "sequences targets"]

    def clip(self, ratio: Float[Tensor, "sequences targets"]) -> Float[Tensor, "sequences targets"]:
        """Hold the ratio between the bounds."""
        return ratio.clamp(self.lower, self.upper)

    def replaces(self, ratio: Float[Tensor, "sequences targets"]) -> Bool[Tensor, "sequences targets"]:
        """Return which ratios a bound replaces."""
        return (ratio < self.lower) | (ratio > self.upper)


@dataclass(frozen=True)
class ObjectiveInputs:
    """Tokens of one microbatch. All tensors have the same shape and are finite where masked.

    Log-probabilities are in nats. The loss of a token is multiplied by its weight, averaged over the global batch and
    added to the penalties after the objective.

    Attributes:
        logprobs: Log-probability of each sampled token by the policy that is trained. Carries the graph.
        prev_logprobs: By the policy before the step; equal to `logprobs`, without a graph, where each step is one
            update and no pass computes them.
        generation_logprobs: By the engine that sampled the tokens.
        reference_logprobs: By the reference model; None without one.
        ratio: `exp(logprobs - prev_logprobs)`, of whole sequences with `sequence_level_importance_ratios`. Carries the
            graph.
        weights: Importance-sampling weights; 1 without a correction.
        advantages: Of each token; the same at all tokens of a response, unless the estimator gives one for each.
        mask: True where a token counts.
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
    """Return bounds that hold no ratio back."""
    return RatioBounds(advantages.new_zeros(advantages.shape), advantages.new_full(advantages.shape, float("inf")))


def both_bounds(advantages: Float[Tensor, "sequences targets"], config: PolicyGradientLossConfig) -> RatioBounds:
    """Return `1 - ratio_clip_min` and `1 + ratio_clip_max` for every token, whatever its advantage."""
    return RatioBounds(
        advantages.new_full(advantages.shape, 1 - config.ratio_clip_min),
        advantages.new_full(advantages.shape, 1 + config.ratio_clip_max),
    )


def surrogate_bounds(advantages: Float[Tensor, "sequences targets"], config: PolicyGradientLossConfig) -> RatioBounds:
    """Compute the bounds that the clipped surrogate comes to, given the sign of the advantage.

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


def clipped(inputs: ObjectiveInputs) -> Float[Tensor, "sequences targets"]:
    """Compute `-clip(ratio) * A` (PPO, arXiv:1707.06347, eq. 7). A clipped token has no gradient."""
    return -surrogate_bounds(inputs.advantages, inputs.config).clip(inputs.ratio) * inputs.advantages


def cispo(inputs: ObjectiveInputs) -> Float[Tensor, "sequences targets"]:
    """Compute `-clip(ratio) * A * logprob` with the clipped ratio a constant (MiniMax-M1, arXiv:2506.13585).

    Every token keeps its gradient. There is no dual clip.
    """
    ratio = both_bounds(inputs.advantages, inputs.config).clip(inputs.ratio)
    return -ratio.detach() * inputs.advantages * inputs.logprobs


def reinforce(inputs: ObjectiveInputs) -> Float[Tensor, "sequences targets"]:
    """Compute `-A * logprob`, without a ratio (REINFORCE, Williams 1992).

    Where a step is one update, its gradient is that of the others.
    """
    return -inputs.advantages * inputs.logprobs


@dataclass(frozen=True)
class Objective:
    """An objective of the policy-gradient loss.

    Attributes:
        name: Name in `loss_fn.objective`.
        function: Computes the loss of each token.
        bounds: Computes the bounds that it holds the ratio between, for the metrics of clipping.
        unread: Keys of `loss_fn`, of those in `SWITCHES`, that it does not read, each with the reason for the error.
    """

    name: str
    function: Callable[[ObjectiveInputs], Float[Tensor, "sequences targets"]]
    bounds: Callable[[Float[Tensor, "sequences targets"], PolicyGradientLossConfig], RatioBounds] = no_bounds
    unread: Mapping[str, str] = field(default_factory=dict)


SWITCHES: Mapping[str, bool | None] = {"ratio_clip_c": None, "sequence_level_importance_ratios": False}
"""Keys of `loss_fn` that only some objectives read, with the value that stands where one does not."""

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
"""By the name in `loss_fn.objective`. A new objective is a function here and a record in this registry."""


def objective_reads_its_settings(config: GRPOMasterConfig) -> Iterator[str]:
    """Check that the objective reads the settings that are on."""
    loss = config.loss_fn
    objective = OBJECTIVES.get(loss.objective)
    for key, reason in objective.unread.items() if objective is not None else ():
        value, off = getattr(loss, key), SWITCHES[key]
        if value != off:
            got, expected = ("null" if word is None else str(word).lower() for word in (value, off))
            yield f"loss_fn.{key}: got {got}, expected {expected} with loss_fn.objective {loss.objective}{reason}"
