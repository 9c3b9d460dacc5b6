# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Generalized advantage estimation over the sampled tokens of trajectories (arXiv:1506.02438)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

VARIANCE_FLOOR = 1e-8
"""Added to a variance before division by its square root."""


def order_in_time(
    token_turns: Int[Tensor, "trajectories tokens"], mask: Bool[Tensor, "trajectories tokens"]
) -> Int[Tensor, "trajectories longest"]:
    """Return the positions of trained tokens in the order in which they were sampled, aligned at the end.

    If the environment alternates between several conversations, a trajectory has one after the other, so a later
    position may be earlier in time. If a trajectory has fewer than `longest` trained tokens, its row begins with
    positions of untrained tokens.

    Args:
        token_turns: Index in time of the turn of each sampled token.
        mask: True at trained tokens.
    """
    longest = int(mask.sum(dim=1).max()) if mask.numel() else 0
    order = token_turns.where(mask, -1).argsort(dim=1, stable=True)
    return order[:, order.shape[1] - longest :]


def token_rewards(
    rewards: Float[Tensor, " trajectories"],
    turn_rewards: Float[Tensor, "trajectories turns"],
    token_turns: Int[Tensor, "trajectories tokens"],
    mask: Bool[Tensor, "trajectories tokens"],
) -> Float[Tensor, "trajectories tokens"]:
    """Return rewards of tokens: a turn's reward at its last trained token, and the rest of the reward at the last
    token.

    The reward of a turn without trained tokens goes to the turn before, if there is one. Tokens are in the order in
    which they were sampled.

    Args:
        rewards: Reward of each trajectory, including the rewards of its turns.
        turn_rewards: Rewards of turns. 0 after the last turn.
        token_turns: Index of the turn of each sampled token, from 0.
        mask: True at trained tokens.
    """
    import torch

    found = torch.zeros(mask.shape, dtype=rewards.dtype)
    positions = torch.arange(1, mask.shape[1] + 1)

    def place(values: Float[Tensor, " trajectories"], where: Bool[Tensor, "trajectories tokens"]) -> None:
        last = (where * positions).amax(dim=1)  # 0 means no token
        found.scatter_add_(1, (last - 1).clamp(min=0)[:, None], values.where(last > 0, 0.0)[:, None])

    for turn in range(turn_rewards.shape[1]):
        place(turn_rewards[:, turn], mask & (token_turns <= turn))
    place(rewards - turn_rewards.sum(dim=1), mask)
    return found


def generalized_advantages(
    rewards: Float[Tensor, "trajectories tokens"],
    values: Float[Tensor, "trajectories tokens"],
    mask: Bool[Tensor, "trajectories tokens"],
    *,
    discount: float,
    decay: float,
) -> Float[Tensor, "trajectories tokens"]:
    """Return `A_t = d_t + discount * decay * A_t+1` with `d_t = r_t + discount * V_t+1 - V_t`.

    This is generalized advantage estimation (arXiv:1506.02438, eq. 16). A time step `t` is a trained token, and `t + 1`
    is the next trained token. Tokens of the environment between these two cause no discount. The value after the last
    token is 0, even for truncated trajectories.

    Args:
        rewards: `r`, at each token.
        values: `V`, the value of the state in which each token is chosen. Not read where masked.
        mask: True at trained tokens.
        discount: `gamma`.
        decay: `lambda`. 1 gives discounted returns minus values, 0 one-step differences.

    Returns:
        Advantages, 0 where masked.
    """
    import torch

    # One row per token: the columns of a matrix are far apart in memory, and there may be thousands.
    of_token, value_of, trained_at = (each.T.contiguous() for each in (rewards, values.to(rewards), mask))
    advantages = torch.zeros_like(of_token)
    following, next_value = rewards.new_zeros(len(rewards)), rewards.new_zeros(len(rewards))
    for token in range(len(of_token) - 1, -1, -1):
        trained, value = trained_at[token], value_of[token]
        difference = of_token[token] + discount * next_value - value
        following = (difference + discount * decay * following).where(trained, following)
        next_value = value.where(trained, next_value)
        advantages[token] = following.where(trained, 0.0)
    return advantages.T.contiguous()


def whitened(
    advantages: Float[Tensor, "trajectories tokens"], mask: Bool[Tensor, "trajectories tokens"]
) -> Float[Tensor, "trajectories tokens"]:
    """Return advantages minus their mean over the tokens of a step, divided by their sample standard deviation.

    Masked advantages are 0. With a single token, only the mean is subtracted.
    """
    import torch

    chosen = advantages[mask]
    if not chosen.numel():
        return advantages.clone()
    centred = advantages - chosen.mean()
    if chosen.numel() > 1:
        centred = centred * torch.rsqrt(chosen.var() + VARIANCE_FLOOR)
    return centred.where(mask, 0.0)


def explained_variance(values: Float[Tensor, " tokens"], returns: Float[Tensor, " tokens"]) -> float:
    """Return `1 - Var(returns - values) / Var(returns)`: 1 for perfect values, 0 for constant values.

    NaN if all returns are equal, as there is nothing to explain.
    """
    errors, exact = (returns - values).double(), returns.double()
    variance = float(exact.var(correction=0)) if exact.numel() else 0.0
    return 1.0 - float(errors.var(correction=0)) / variance if variance > 0 else float("nan")
