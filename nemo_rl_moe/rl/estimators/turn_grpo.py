# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""GRPO with credit by turn: the return from each turn on is compared with the group's returns at the same turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nemo_rl_moe.rl.estimators.comparison import compare_within_groups
from nemo_rl_moe.rl.estimators.interface import Estimator, EstimatorInputs

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor


def turn_advantages(inputs: EstimatorInputs, *, divides: bool) -> Float[Tensor, "groups generations turns"]:
    """Return the advantage of each turn.

    The return of turn k of response i is `G[i, k] = r[i, k] + r[i, k + 1] + ... + R[i]`: the rewards of this turn and
    of later turns, and the part of the response's reward that belongs to no turn. It is the undiscounted return of
    Sutton and Barto (2018, eq. 3.7) with a turn as a step. Returns are compared like rewards in GRPO (arXiv:2402.03300,
    section 4.1.2), among the responses of the group that have a turn k:
    `A[i, k] = (G[i, k] - mean_j G[j, k]) / std_j G[j, k]`.

    GTPO (Ding et al. 2025, arXiv:2511.14846) also uses normalised returns of turns as advantages, but with a discount.
    Here the discount is 1. GRPO with process supervision (arXiv:2402.03300, section 4.1.3) normalises rewards before
    adding them.

    If no other response of the group has a turn k, turn k gets the advantage of the turn before, whose return includes
    the return of turn k. With a single turn, the advantages are the same as with the estimator `grpo`.
    """
    import torch

    rewards, turn_rewards = inputs.rewards.double(), inputs.turn_rewards.double()
    of_response = (rewards - turn_rewards.sum(dim=2))[:, :, None]
    returns = turn_rewards.flip(2).cumsum(dim=2).flip(2) + of_response
    has_turn = _has_turn(inputs, turn_rewards.shape[2])
    found: list[Tensor] = []
    for turn in range(returns.shape[2]):
        compared = compare_within_groups(returns[:, :, turn], has_turn[:, :, turn], inputs.config, divides=divides)
        is_alone = has_turn[:, :, turn] & (has_turn[:, :, turn].sum(dim=1) == 1)[:, None]
        found.append(compared.where(~is_alone, found[-1]) if found else compared)
    return torch.stack(found, dim=2)


def turn_grpo_advantages(inputs: EstimatorInputs) -> Float[Tensor, "groups generations tokens"]:
    """Return each token's advantage, which is its turn's. Tokens that the model did not sample have 0."""
    of_turns = turn_advantages(inputs, divides=inputs.config.normalize_rewards)
    of_tokens = of_turns.gather(2, inputs.token_turns.clamp(min=0))
    return of_tokens.where(inputs.token_turns >= 0, 0.0)


def any_turn_differs(inputs: EstimatorInputs) -> Bool[Tensor, " groups"]:
    """Return which groups have a turn with an advantage other than 0.

    A group may have such a turn even if all its responses have the same reward, because they may earn it in different
    turns.
    """
    return (turn_advantages(inputs, divides=False) != 0).flatten(1).any(dim=1)


def _has_turn(inputs: EstimatorInputs, num_turns: int) -> Bool[Tensor, "groups generations turns"]:
    """Return a mask of each response's turns. It is False for responses that are not compared (`takes_part`).

    A response that failed before its first turn counts as having one turn.
    """
    import torch

    last = inputs.token_turns.amax(dim=2).clamp(min=0)
    return (torch.arange(num_turns) <= last[:, :, None]) & inputs.takes_part[:, :, None]


TURN_GRPO = Estimator(
    "turn_grpo",
    turn_grpo_advantages,
    reads=frozenset({"use_leave_one_out_baseline"}),
    of_tokens=True,
    is_informative=any_turn_differs,
)
