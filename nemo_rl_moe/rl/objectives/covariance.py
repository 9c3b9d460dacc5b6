# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Clip-Cov and KL-Cov: tokens whose update would lower the policy's entropy most are dropped, or held back.

The entropy falls with the covariance of log-probability and advantage (Cui et al. 2025, arXiv:2505.22617). The part of
token `i` of `N` is `Cov_i = (log pi_i - mean_j log pi_j) * (A_i - mean_j A_j)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from nemo_rl_moe.rl.objectives.clipped import clipped, surrogate_clipping
from nemo_rl_moe.rl.objectives.interface import Objective, ObjectiveInputs

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Generator, Tensor

    from nemo_rl_moe.config.schema import GRPOMasterConfig
    from nemo_rl_moe.config.schema_grpo import PolicyGradientLossConfig

ROUNDING = 1e-5
"""Largest difference of two log-probabilities of the same float32 weights, in nats, that is rounding."""


def covariances(logprobs: Float[Tensor, " tokens"], advantages: Float[Tensor, " tokens"]) -> Float[Tensor, " tokens"]:
    """Return each token's part of the covariance of log-probability and advantage, in nats."""
    exact = logprobs.double(), advantages.double()
    of_logprobs, of_advantages = (each - each.mean() for each in exact)
    return of_logprobs * of_advantages


def select_clipped(
    logprobs: Float[Tensor, "sequences tokens"],
    advantages: Float[Tensor, "sequences tokens"],
    mask: Bool[Tensor, "sequences tokens"],
    config: PolicyGradientLossConfig,
    generator: Generator,
) -> Bool[Tensor, "sequences tokens"]:
    """Return `cov_ratio * N` random tokens with a covariance between `clip_cov_min` and `clip_cov_max`."""
    import torch

    found = covariances(logprobs[mask], advantages[mask])
    candidates = ((found > config.clip_cov_min) & (found < config.clip_cov_max)).nonzero()[:, 0]
    order = torch.randperm(len(candidates), generator=generator)
    return _at(mask, candidates[order[: _number(config, len(found))]])


def select_penalised(
    logprobs: Float[Tensor, "sequences tokens"],
    advantages: Float[Tensor, "sequences tokens"],
    mask: Bool[Tensor, "sequences tokens"],
    config: PolicyGradientLossConfig,
    generator: Generator,
) -> Bool[Tensor, "sequences tokens"]:
    """Return the `cov_ratio * N` tokens with the largest covariance."""
    found = covariances(logprobs[mask], advantages[mask])
    largest = found.argsort(descending=True, stable=True)
    return _at(mask, largest[: _number(config, len(found))])


def _number(config: PolicyGradientLossConfig, num_tokens: int) -> int:
    return max(int(config.cov_ratio * num_tokens), 1)


def _at(mask: Bool[Tensor, "sequences tokens"], chosen: Tensor) -> Bool[Tensor, "sequences tokens"]:
    """Return a mask of the chosen ones among the tokens of a mask."""
    places = mask.nonzero()[chosen]
    selected = mask.new_zeros(mask.shape)
    selected[places[:, 0], places[:, 1]] = True
    return selected


def clip_cov(inputs: ObjectiveInputs) -> Float[Tensor, "sequences targets"]:
    """Return the clipped surrogate, and 0 for the selected tokens (Clip-Cov, arXiv:2505.22617)."""
    assert inputs.selected is not None
    return clipped(inputs).masked_fill(inputs.selected, 0.0)


def kl_cov(inputs: ObjectiveInputs) -> Float[Tensor, "sequences targets"]:
    """Return `-ratio * A`, plus `kl_cov_coef * |log ratio|` for the selected tokens (KL-Cov, arXiv:2505.22617).

    The ratio is not clipped. Its logarithm counts from `ROUNDING` on: the gradient of the penalty has the size
    `kl_cov_coef` however small the logarithm is, and in the first update of a step its sign would be that of rounding.
    """
    assert inputs.selected is not None
    moved = inputs.log_ratio.abs()
    penalty = (inputs.config.kl_cov_coef * moved).where(inputs.selected & (moved > ROUNDING), 0.0)
    return -inputs.ratio * inputs.advantages + penalty


def covariances_are_in_order(config: GRPOMasterConfig) -> Iterator[str]:
    """Check that the bounds of the covariance are in order."""
    loss = config.loss_fn
    if loss.clip_cov_min >= loss.clip_cov_max:
        yield (
            f"loss_fn.clip_cov_min: got {loss.clip_cov_min}, expected less than loss_fn.clip_cov_max ="
            f" {loss.clip_cov_max}"
        )


def ratio_moves(config: GRPOMasterConfig) -> Iterator[str]:
    """Check that the ratio can differ from 1, since the penalty has no gradient at 1."""
    is_ahead = config.grpo.rollouts.most_lag > 0 and config.loss_fn.importance_sampling_correction == "none"
    if config.updates_per_step == 1 and not is_ahead:
        yield (
            f"policy.train_global_batch_size: got {config.policy.train_global_batch_size}, expected less than the"
            f" {config.responses_per_step} responses of a step with loss_fn.objective kl_cov: with one update a step"
            " the ratio is 1, where its penalty has no gradient"
        )


_BY_TOKEN = ", which compares tokens"
CLIP_COV = Objective(
    "clip_cov",
    clip_cov,
    surrogate_clipping,
    bounds_weight=True,
    select=select_clipped,
    unread={"sequence_level_importance_ratios": _BY_TOKEN},
    rules=(covariances_are_in_order,),
)
KL_COV = Objective(
    "kl_cov",
    kl_cov,
    select=select_penalised,
    unread={"ratio_clip_c": "", "sequence_level_importance_ratios": _BY_TOKEN},
    rules=(ratio_moves,),
)
