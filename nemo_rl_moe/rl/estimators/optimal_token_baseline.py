# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Optimal token baseline: each token has the baseline with the least variance of the gradient (arXiv:2602.07078)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from nemo_rl_moe.rl.estimators.comparison import EQUAL_REWARDS_TOLERANCE
from nemo_rl_moe.rl.estimators.interface import Estimator, EstimatorInputs, rewards_are_not_scaled
from nemo_rl_moe.rl.gae import token_rewards

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from nemo_rl_moe.config.schema import GRPOMasterConfig


def token_advantages(inputs: EstimatorInputs) -> Float[Tensor, "groups generations tokens"]:
    """Return `A_t = G_t - B_t` with `B_t = sum_i G_it W_it / sum_i W_it`, over the responses `i` of the group.

    `t` counts the sampled tokens of a response in order of time. `G_t` is the return: the rewards from token `t` on.
    `W_t = sum_{j <= t} w_j` adds up the squared norms `w_j = 1 - 2 pi_j + sum_v pi_v^2` of the gradients of the tokens'
    log-probabilities by the logits (the logit-gradient proxy). A token that no other response of the group reaches has
    the baseline 0, as in verl: its advantage is the return, even if all rewards are equal. Before the norms are known,
    all are 1.
    """
    import torch

    groups, generations, tokens = inputs.token_mask.shape
    mask = inputs.token_mask & inputs.takes_part[:, :, None]
    turns = inputs.token_turns
    # Sampled tokens come first, in order of time.
    order = turns.where(mask, int(turns.max()) + 1).argsort(dim=2, stable=True)

    def in_time(values: Tensor) -> Tensor:
        return values.gather(2, order)

    rows = (groups * generations, -1)
    rewards = token_rewards(
        inputs.rewards.double().reshape(-1),
        inputs.turn_rewards.double().reshape(*rows),
        in_time(turns).view(*rows),
        in_time(mask).view(*rows),
    ).view(groups, generations, tokens)
    norms = torch.ones_like(rewards) if inputs.score_norms is None else in_time(inputs.score_norms.double())
    counts = in_time(mask)
    returns = rewards.flip(2).cumsum(dim=2).flip(2)
    weights = norms.where(counts, 0.0).cumsum(dim=2).where(counts, 0.0)
    # If all tokens so far were certain, each response counts alike.
    weights = weights.where(weights.sum(dim=1, keepdim=True) > 0, counts.double())
    baseline = (returns * weights).sum(dim=1, keepdim=True) / weights.sum(dim=1, keepdim=True).clamp(min=1e-300)
    is_alone = counts.sum(dim=1, keepdim=True) < 2
    advantages = (returns - baseline.where(~is_alone, 0.0)).where(counts, 0.0)
    return torch.zeros_like(advantages).scatter(2, order, advantages)


def any_token_has_an_advantage(inputs: EstimatorInputs) -> Bool[Tensor, " groups"]:
    """Return which groups have a token with an advantage other than 0, apart from rounding.

    Which groups these are does not depend on the norms.
    """
    largest = token_advantages(inputs).abs().flatten(1).amax(dim=1)
    magnitude = inputs.rewards.double().abs().amax(dim=1).clamp(min=1.0)
    # In this form, a group with a NaN counts.
    return ~(largest <= EQUAL_REWARDS_TOLERANCE * magnitude)


def probabilities_are_of_all_tokens(config: GRPOMasterConfig) -> Iterator[str]:
    """Check that probabilities are over the full vocabulary."""
    if config.loss_fn.sampling_mask != "none":
        yield (
            f"loss_fn.sampling_mask: got {config.loss_fn.sampling_mask}, expected none with grpo.adv_estimator.name"
            " optimal_token_baseline, whose norms of gradients are over the full vocabulary"
        )


OPTIMAL_TOKEN_BASELINE = Estimator(
    "optimal_token_baseline",
    token_advantages,
    of_tokens=True,
    needs_score_norms=True,
    is_informative=any_token_has_an_advantage,
    rules=(rewards_are_not_scaled, probabilities_are_of_all_tokens),
)
