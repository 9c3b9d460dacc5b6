# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Record of an objective of the policy-gradient loss, and the inputs of its function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Generator, Tensor

    from nemo_rl_moe.config.schema import GRPOMasterConfig
    from nemo_rl_moe.config.schema_grpo import PolicyGradientLossConfig

    Select = Callable[
        [
            Float[Tensor, "sequences tokens"],
            Float[Tensor, "sequences tokens"],
            Bool[Tensor, "sequences tokens"],
            PolicyGradientLossConfig,
            Generator,
        ],
        Bool[Tensor, "sequences tokens"],
    ]

LARGEST_LOG_RATIO = 20.0
"""Largest exponent of a ratio: e^20 is half a billion, and float32 overflows at e^88."""


@dataclass(frozen=True)
class Clipping:
    """Tokens that an objective stops, since the policy has moved too far from the one before.

    A stopped token has no gradient, or a constant weight (CISPO).

    Attributes:
        low: True if the probability of the token has fallen too far.
        high: True if it has risen too far.
    """

    low: Bool[Tensor, "sequences targets"]
    high: Bool[Tensor, "sequences targets"]

    @property
    def any(self) -> Bool[Tensor, "sequences targets"]:
        """Return which tokens are stopped."""
        return self.low | self.high


@dataclass(frozen=True)
class RatioBounds:
    """Bounds of the probability ratio in an objective.

    The objective replaces a ratio below `lower` or above `upper` by this bound, and its gradient by 0.
    """

    lower: Float[Tensor, "sequences targets"]
    upper: Float[Tensor, "sequences targets"]

    def clip(self, ratio: Float[Tensor, "sequences targets"]) -> Float[Tensor, "sequences targets"]:
        return ratio.clamp(self.lower, self.upper)

    def clipping(self, ratio: Float[Tensor, "sequences targets"]) -> Clipping:
        """Return which ratios a bound replaces."""
        return Clipping(ratio < self.lower, ratio > self.upper)


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
            It is relative to `generation_logprobs` if the objective asks for this, or if older weights sampled the
            tokens and no correction weighs them.
        log_ratio: Logarithm of the ratio of each single token, in nats. It has no bounds, and carries the graph.
        weights: Importance-sampling weights, 1 without a correction.
        advantages: Advantage of each token. All tokens of a response have the same, unless the estimator distinguishes
            them.
        mask: True at tokens that count.
        global_valid_tokens: Number of tokens that count in the global batch, over all ranks.
        global_sequences: Number of sequences with such a token in the global batch.
        config: The section `loss_fn`, with bounds such as `ratio_clip_min`.
        selected: True at the tokens that the objective's `select` has chosen. None without a `select`.
    """

    logprobs: Float[Tensor, "sequences targets"]
    prev_logprobs: Float[Tensor, "sequences targets"]
    generation_logprobs: Float[Tensor, "sequences targets"]
    reference_logprobs: Float[Tensor, "sequences targets"] | None
    ratio: Float[Tensor, "sequences targets"]
    log_ratio: Float[Tensor, "sequences targets"]
    weights: Float[Tensor, "sequences targets"]
    advantages: Float[Tensor, "sequences targets"]
    mask: Bool[Tensor, "sequences targets"]
    global_valid_tokens: int
    global_sequences: int
    config: PolicyGradientLossConfig
    selected: Bool[Tensor, "sequences targets"] | None = None


def no_clipping(inputs: ObjectiveInputs) -> Clipping:
    """Return that no token is stopped."""
    none = inputs.mask.new_zeros(inputs.mask.shape)
    return Clipping(none, none)


@dataclass(frozen=True)
class Objective:
    """An objective of the policy-gradient loss.

    Attributes:
        name: Name in `loss_fn.objective`.
        function: Function that returns the loss of each token.
        clipping: Function that returns the tokens that the objective stops, for the metrics of clipping.
        bounds_weight: Whether the objective bounds the weight of a token that older weights sampled.
        of_sequences: Whether the tokens of a sequence share one ratio.
        ratio_to_generation: Whether the ratio is always relative to the log-probabilities of the engine.
        select: Function that chooses tokens from all trained tokens of a step, before the step's first update. It gets
            the log-probabilities of the policy before the step, the advantages, the mask, the section `loss_fn`, and a
            generator of random numbers. Only the driver has all tokens, so that the choice does not depend on layout
            and microbatches.
        unread: Key in `SWITCHES` that the objective does not read -> reason in the error message.
        rules: Checks of a configuration with this objective. Each yields a line per problem.
    """

    name: str
    function: Callable[[ObjectiveInputs], Float[Tensor, "sequences targets"]]
    clipping: Callable[[ObjectiveInputs], Clipping] = no_clipping
    bounds_weight: bool = False
    of_sequences: bool = False
    ratio_to_generation: bool = False
    select: Select | None = None
    unread: Mapping[str, str] = field(default_factory=dict)
    rules: tuple[Callable[[GRPOMasterConfig], Iterator[str]], ...] = ()


SWITCHES: Mapping[str, bool | None] = {"ratio_clip_c": None, "sequence_level_importance_ratios": False}
"""Key of `loss_fn` that only some objectives read -> its value with other objectives."""
