# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Router replay: a router takes the experts that a tape names, with the scores that it gives them itself.

R3 (https://arxiv.org/abs/2510.11370) replays the experts of the rollout in training, R2 those of the old policy in the
later updates of a step. Probabilities stay the router's own, so that its gradient is exact for these experts.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

ROUTED_EXPERTS = "routed_experts"
"""Column of a batch: experts of each token in each MoE layer, `[batch, sequence, moe_layers, topk]`, int16."""
UNKNOWN = -1
"""Stands for every expert of a row that a tape has no routes for."""

ComputeTopk = Callable[..., tuple[Tensor, Tensor]]
"""Scores, topk, groups and groups of each token, to values and experts, `[tokens, topk]` both."""


class Choice(Protocol):
    """Occupant of a router's `router_replay` slot, as Megatron-Core calls it."""

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int, group_topk: int, default_compute_topk: ComputeTopk
    ) -> tuple[Tensor, Tensor]:
        """Values and experts of each token, in place of `default_compute_topk`."""
        ...


def in_order(routes: Int[Tensor, "... topk"]) -> Int[Tensor, "... topk"]:
    """Rows with their experts in ascending order, so that equal sets are equal rows."""
    return routes.sort(-1).values


def usable_rows(ranked: Int[Tensor, "... topk"], num_experts: int) -> Bool[Tensor, "..."]:
    """Rows that name experts that there are, each once; what else a row holds is never replayed.

    Args:
        ranked: Rows `in_order`.
        num_experts: Experts of a layer.
    """
    in_range = (ranked[..., 0] >= 0) & (ranked[..., -1] < num_experts)
    return in_range & (ranked[..., 1:] != ranked[..., :-1]).all(-1)


def replayed(
    live: Int[Tensor, "tokens topk"], routes: Int[Tensor, "tokens topk"], num_experts: int
) -> Int[Tensor, "tokens topk"]:
    """The experts that a router takes: those of the tape where it has a usable row, its own otherwise.

    Where both are the same set the router's order stays, so that the replay of its own choice changes no bit.

    Args:
        live: The router's own choice.
        routes: Rows of the tape, `UNKNOWN` where it has none.
        num_experts: Experts of the layer.
    """
    ranked = in_order(routes)
    takes = usable_rows(ranked, num_experts) & (ranked != in_order(live)).any(-1)
    return torch.where(takes[:, None], routes, live)


class RoutedTokens(NamedTuple):
    """One router's choice for the tokens of one forward pass.

    Attributes:
        live: The experts that it would choose.
        taken: Those that it took; the same tensor without replay.
        margin: Score of the last expert that it would choose less that of the first one that it would not; None unless
            asked for.
    """

    live: Int[Tensor, "tokens topk"]
    taken: Int[Tensor, "tokens topk"]
    margin: Float[Tensor, " tokens"] | None


class RouterTap:
    """A tap in a router's `router_replay` slot: it shows what the router chooses, and replays what it is given.

    Serves every score function, expert bias and groups of experts, because Megatron-Core asks the slot for nothing but
    the top experts. A fused router does not ask it.

    Args:
        inner: What stood in the slot before; chooses in place of plain top-k.
        counts_replayed: Under replay, what counts as load is what the router took, not what it would choose.

    Attributes:
        routes: Experts to take, `[tokens, topk]` in the order of the router's tokens; None: its own.
        shows: Keep what is chosen in `seen`, pass after pass.
        shows_margin: The margin as well, for one more top-k.
        seen: What was shown and not taken yet.
        counted: Experts that auxiliary losses and the expert bias are to count, of the last forward pass with `routes`;
            None without: those that the router took are its own.
    """

    def __init__(self, inner: Choice | None = None, *, counts_replayed: bool = False):
        self._inner, self._counts_replayed = inner, counts_replayed
        self.routes: Int[Tensor, "tokens topk"] | None = None
        self.shows = self.shows_margin = False
        self.seen: list[RoutedTokens] = []
        self.counted: Int[Tensor, "tokens topk"] | None = None

    def get_replay_topk(
        self,
        scores: Float[Tensor, "tokens experts"],
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: ComputeTopk | None = None,
    ) -> tuple[Float[Tensor, "tokens topk"], Int[Tensor, "tokens topk"]]:
        """Scores and numbers of the experts that are taken.

        Raises:
            ValueError: There are routes of another number of tokens or experts.
        """
        assert default_compute_topk is not None  # Megatron-Core always gives one
        if self._inner is None:
            values, live = default_compute_topk(scores, topk, num_groups, group_topk)
        else:
            values, live = self._inner.get_replay_topk(scores, topk, num_groups, group_topk, default_compute_topk)  # type: ignore[arg-type]
        taken = live
        if self.routes is not None:
            if self.routes.shape != live.shape:
                raise ValueError(f"routes to replay: got {tuple(self.routes.shape)}, expected {tuple(live.shape)}")
            taken = replayed(live, self.routes.to(live.dtype), scores.shape[-1])
            values = scores.gather(1, taken)
        self.counted = None if self.routes is None else (taken if self._counts_replayed else live).detach()
        if self.shows:
            margin = margins(scores.detach(), topk) if self.shows_margin else None
            self.seen.append(RoutedTokens(live.detach(), taken.detach(), margin))
        return values, taken

    def take(self) -> list[RoutedTokens]:
        """Choices shown since they were last taken."""
        seen, self.seen = self.seen, []
        return seen


def margins(scores: Float[Tensor, "tokens experts"], topk: int) -> Float[Tensor, " tokens"]:
    """Score of the last expert chosen less that of the first one left out; infinite where none is left out."""
    if topk >= scores.shape[-1]:
        return torch.full(scores.shape[:1], torch.inf, device=scores.device)
    best = scores.float().topk(topk + 1, dim=-1).values
    return best[:, topk - 1] - best[:, topk]


def experts_as_map(experts: Int[Tensor, "tokens topk"], num_experts: int) -> Bool[Tensor, "tokens experts"]:
    """A map of assignments from the experts' numbers."""
    of_tokens = torch.zeros(len(experts), num_experts, dtype=torch.bool, device=experts.device)
    return of_tokens.scatter_(1, experts, True)


def tap_of(router: Any) -> RouterTap | None:
    """The tap of a router; None without one."""
    slot = getattr(router, "router_replay", None)
    return slot if isinstance(slot, RouterTap) else None
