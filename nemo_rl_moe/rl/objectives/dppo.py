# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""DPPO: tokens are stopped by a divergence of the policy from the engine's policy, not by their ratio."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from nemo_rl_moe.rl.objectives.interface import Clipping, Objective, ObjectiveInputs

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from nemo_rl_moe.config.schema import GRPOMasterConfig

    Divergence = Callable[[Float[Tensor, "*shape"], Float[Tensor, "*shape"]], Float[Tensor, "*shape"]]

LEAST_PROBABILITY = 1e-8
"""Added to the probability of all other tokens before its logarithm, as in verl."""


def total_variation(mu: Float[Tensor, "*shape"], pi: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return `|pi - mu|`: the total variation distance of two distributions over "this token" and "another one"."""
    return (pi - mu).abs()


def kl_divergence(mu: Float[Tensor, "*shape"], pi: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return `KL(mu || pi)` in nats of two distributions over "this token" and "another one"."""
    # Rounding may give a probability above 1.
    others, others_now = ((1 - each).clamp(min=0.0) for each in (mu, pi))
    return mu * (mu / pi).log() + others * ((others + LEAST_PROBABILITY) / (others_now + LEAST_PROBABILITY)).log()


def dppo_clipping(divergence: Divergence, inputs: ObjectiveInputs) -> Clipping:
    """Return the tokens whose probability has moved in the direction of the advantage, by too large a divergence.

    The largest allowed divergence is `ratio_clip_max` for `A > 0`, and `ratio_clip_min` for `A < 0`.
    """
    advantages, config = inputs.advantages, inputs.config
    mu, pi = inputs.generation_logprobs.exp(), inputs.logprobs.detach().exp()
    distance = divergence(mu, pi)
    return Clipping(
        low=(advantages < 0) & (pi < mu) & (distance > config.ratio_clip_min),
        high=(advantages > 0) & (pi > mu) & (distance > config.ratio_clip_max),
    )


def dppo(divergence: Divergence, inputs: ObjectiveInputs) -> Float[Tensor, "sequences targets"]:
    """Return `-M * min(ratio, c) * A * logprob`, with a mask `M` of tokens within the bound (DPPO, arXiv:2602.04879).

    The ratio `pi / mu` is relative to the policy `mu` of the engine, and has no gradient. `M` is 0 for the tokens in
    `dppo_clipping`. The truncation `c` is `ratio_clip_c` (section 5.4).
    """
    ratio, largest = inputs.ratio.detach(), inputs.config.ratio_clip_c
    ratio = ratio if largest is None else ratio.clamp(max=largest)
    loss = -ratio * inputs.advantages * inputs.logprobs
    return loss.masked_fill(dppo_clipping(divergence, inputs).any, 0.0)


def needs_no_correction(config: GRPOMasterConfig) -> Iterator[str]:
    """Check that no correction weighs tokens whose ratio is already relative to the engine."""
    loss = config.loss_fn
    if loss.importance_sampling_correction != "none":
        yield (
            f"loss_fn.importance_sampling_correction: got {loss.importance_sampling_correction}, expected none with"
            f" loss_fn.objective {loss.objective}, whose ratio is already relative to the engine's probabilities"
        )


DPPO_TV, DPPO_KL = (
    Objective(
        name,
        partial(dppo, divergence),
        partial(dppo_clipping, divergence),
        bounds_weight=True,
        ratio_to_generation=True,
        unread={"sequence_level_importance_ratios": ", which weighs each token by its own ratio"},
        rules=(needs_no_correction,),
    )
    for name, divergence in (("dppo_tv", total_variation), ("dppo_kl", kl_divergence))
)
