# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Group-limited top-k as DeepSeek's models mean it.

Experts stand in groups of equal size, and a token goes to experts of a few groups alone. DeepSeek-V2 takes the groups
with the best expert (DeepSeek-AI 2024, arXiv:2405.04434, 2.2.2, and its code), V3 those whose two best experts have the
largest sum (its code; the report, arXiv:2412.19437, 2.1.2, has the `topk / group_topk` best, which are two there).
Megatron-Core adds up the `topk // group_topk` best for both: another model wherever that number is another, without an
error.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nemo_rl_moe.models.megatron import cpu_backend  # noqa: F401  (before megatron.core)

# isort: split
from megatron.core.transformer.moe.router import TopKRouter


def group_limited_topk(
    scores: Tensor, topk: int, num_groups: int, group_topk: int, best_of_group: int
) -> tuple[Tensor, Tensor]:
    """Chooses groups, then experts of these groups.

    Args:
        scores: What experts are chosen by, `[tokens, experts]`.
        topk: Experts of each token.
        num_groups: Groups of experts.
        group_topk: Groups of each token.
        best_of_group: How many of a group's experts are added up to compare it.

    Returns:
        Scores and numbers of the chosen experts, both `[tokens, topk]`, the best first.
    """
    of_groups = scores.unflatten(1, (num_groups, -1))
    group_scores = of_groups.topk(best_of_group, dim=-1).values.sum(-1)
    usable = torch.zeros_like(group_scores, dtype=torch.bool)
    usable.scatter_(1, group_scores.topk(group_topk, dim=-1, sorted=False).indices, True)
    return of_groups.masked_fill(~usable.unsqueeze(-1), float("-inf")).flatten(1).topk(topk, dim=-1)


class GroupLimitedChoice:
    """Stands where a router without `RouterReplay` looks for one, and chooses instead of repeating a choice.

    Args:
        best_of_group: As `group_limited_topk` has it.
    """

    def __init__(self, best_of_group: int):
        self._best_of_group = best_of_group

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int,
        group_topk: int,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """What a router calls for its top experts, `[tokens, experts]` to twice `[tokens, topk]`."""
        return group_limited_topk(scores, topk, num_groups, group_topk, self._best_of_group)


def limit_groups(model: nn.Module) -> None:
    """Gives every router with groups DeepSeek's choice; routing that is replayed stays as recorded."""
    for router in model.modules():
        if not isinstance(router, TopKRouter) or not router.config.moe_router_group_topk:
            continue
        # The score function tells the two models apart.
        choice = GroupLimitedChoice(1 if router.config.moe_router_score_function == "softmax" else 2)
        if router.router_replay is None:
            router.router_replay = choice
        else:
            replay = router.router_replay
            replay.get_replay_topk = partial(_replay_or_choose, replay.get_replay_topk, choice)


def _replay_or_choose(replay: Callable[..., Any], choice: GroupLimitedChoice, *arguments: Any) -> Any:
    """Calls a `RouterReplay` with another function to choose by, which is the last of its arguments."""
    return replay(*arguments[:-1], choice.get_replay_topk)
