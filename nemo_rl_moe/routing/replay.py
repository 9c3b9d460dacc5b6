# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Router replay: a router takes the captured experts of a token, weighted by its own scores.

R3 (https://arxiv.org/abs/2510.11370) replays the experts of the rollout in training. R2 replays the experts of the old
policy in the later updates of a step. The probabilities are the router's, so its gradient is exact for these experts.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from nemo_rl_moe.shapes import Bool, Float, Int

ROUTED_EXPERTS = "routed_experts"
"""Column of a batch: experts of each token in each MoE layer, `[batch, sequence, moe_layers, topk]`, int16."""
UNKNOWN = -1
"""Expert id in the rows of tokens whose routes were not captured."""

ComputeTopk = Callable[..., tuple[Tensor, Tensor]]
"""(scores, topk, number of groups, groups of each token) -> (values, experts), both `[tokens, topk]`."""


class Choice(Protocol):
    """Object in the `router_replay` attribute of a Megatron-Core router, which calls it to choose experts."""

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int, group_topk: int, default_compute_topk: ComputeTopk
    ) -> tuple[Tensor, Tensor]:
        """Return the scores and the ids of each token's experts. Called instead of `default_compute_topk`."""
        ...


@runtime_checkable
class ChoiceWithMargins(Choice, Protocol):
    """Choice by a rule other than the highest scores. It has its own `margins`, which follow this rule."""

    def margins(
        self, scores: Float[Tensor, "tokens experts"], topk: int, num_groups: int, group_topk: int
    ) -> Float[Tensor, " tokens"]:
        """Return by how much the last chosen expert of each token scores above the best unchosen one, by its rule."""
        ...


def in_order(routes: Int[Tensor, "... topk"]) -> Int[Tensor, "... topk"]:
    return routes.sort(-1).values


def plane_type(num_experts: int) -> torch.dtype:
    """Return the dtype for `in_planes`: 8 bits if these hold all expert ids and `UNKNOWN` (as 255), otherwise 16."""
    return torch.uint8 if num_experts < 256 else torch.int16


def in_planes(routes: Int[Tensor, "tokens *layers topk"], num_experts: int) -> Int[Tensor, "topk *layers tokens"]:
    """Return routes with the tokens as the last dimension, so that compared values are contiguous."""
    return routes.to(plane_type(num_experts)).permute(*reversed(range(routes.ndim))).contiguous()


def all_of(planes: Bool[Tensor, "topk *layers tokens"]) -> Bool[Tensor, "*layers tokens"]:
    """Return `planes.all(0)`, in half the time on a CPU."""
    return planes.view(torch.uint8).amin(0).view(torch.bool)


def named_too(
    some: Int[Tensor, "topk *layers tokens"], others: Int[Tensor, "topk *layers tokens"]
) -> Int[Tensor, "topk *layers tokens"]:
    """Return 1 for each expert in `some` that `others` has for the same token and layer too, otherwise 0."""
    return (some[:, None] == others).view(torch.uint8).amax(1)


def num_in_common(
    some: Int[Tensor, "topk *layers tokens"], others: Int[Tensor, "topk *layers tokens"]
) -> Int[Tensor, "*layers tokens"]:
    """Return the number of common experts of each token in each layer.

    If no expert occurs twice, the number `topk` means that both sets are equal.
    """
    return named_too(some, others).sum(0, dtype=torch.uint8)


class LayerRoutes(NamedTuple):
    """Captured experts of the tokens of one router, ready to be replayed."""

    planes: Int[Tensor, "topk tokens"]
    num_usable: Int[Tensor, " tokens"]
    experts: Int[Tensor, "tokens topk"]


class ReplayRoutes(NamedTuple):
    """Captured experts, ready to be compared. A row has the experts of one token in one layer.

    Attributes:
        unknown: Rows that consist of `UNKNOWN`.
        in_range: Rows that name only existing experts.
        usable: Rows that name existing experts, each once. Only these are replayed.
    """

    planes: Int[Tensor, "topk *layers tokens"]
    unknown: Bool[Tensor, "*layers tokens"]
    in_range: Bool[Tensor, "*layers tokens"]
    usable: Bool[Tensor, "*layers tokens"]
    num_usable: Int[Tensor, "*layers tokens"]

    @classmethod
    def of(cls, routes: Int[Tensor, "tokens *layers topk"], num_experts: int) -> "ReplayRoutes":
        """Prepare the routes of one or several layers. Rows in `routes` that were not captured must be `UNKNOWN`."""
        wide = routes.permute(*reversed(range(routes.ndim))).contiguous()
        is_expert = wide.clamp(0, num_experts - 1) == wide
        unknown, in_range = all_of(wide == UNKNOWN), all_of(is_expert)
        planes = wide.where(is_expert, UNKNOWN).to(plane_type(num_experts))
        # Every expert equals itself. 8 bits count the equal pairs of up to 16 experts without overflow.
        counter = torch.uint8 if len(planes) <= 16 else torch.int32
        num_pairs = (planes[:, None] == planes).view(torch.uint8).sum((0, 1), dtype=counter)
        usable = in_range & (num_pairs == len(planes))
        return cls(planes, unknown, in_range, usable, usable.view(torch.uint8) * len(planes))

    def by_layer(self) -> list[LayerRoutes]:
        """Return the routes of each layer."""
        experts = self.planes.permute(1, 2, 0).to(torch.long, memory_format=torch.contiguous_format)
        parts = zip(self.planes.unbind(1), self.num_usable.unbind(), experts.unbind(), strict=True)
        return [LayerRoutes(*of_layer) for of_layer in parts]


def replayed(live: Int[Tensor, "tokens topk"], routes: LayerRoutes) -> Int[Tensor, "tokens topk"]:
    """Return the experts that a router takes for each token: the captured ones if usable, otherwise its choice.

    If both are the same set, the router's order is kept, so that replaying its own choice changes no bit.
    """
    chosen = live.T.to(routes.planes.dtype, memory_format=torch.contiguous_format)
    keeps = num_in_common(routes.planes, chosen) >= routes.num_usable
    return torch.where(keeps[:, None], live, routes.experts)


def or_tied(
    live: Int[Tensor, "tokens topk"], scores: Float[Tensor, "tokens experts"], captured: LayerRoutes
) -> Int[Tensor, "tokens topk"]:
    """Return a router's choice for each token, or the captured experts if none scores below the last chosen expert."""
    named = captured.experts.clamp(0, scores.shape[1] - 1)
    last = scores.gather(1, live).amin(1, keepdim=True)
    is_as_good = (scores.gather(1, named) >= last).all(1) & (captured.num_usable > 0)
    return torch.where(is_as_good[:, None], named.to(live.dtype), live)


class RoutedTokens(NamedTuple):
    """One router's choice for the tokens of one forward pass."""

    live: Int[Tensor, "tokens topk"]
    taken: Int[Tensor, "tokens topk"]
    margin: Float[Tensor, " tokens"] | None


class RouterHook:
    """Hook in a router's `router_replay` attribute. It records the router's choices and replays captured routes.

    It works with every score function, expert bias and group of experts, because Megatron-Core calls it only to choose
    the top experts. A fused router does not call it.

    Args:
        inner: Previous object in the attribute. It is called for the choice, instead of plain top-k.
        counts_replayed: Whether the replayed experts count as load, instead of the router's choice.

    Attributes:
        counted: Experts that count as load. None means the plain top-k of the scores.
        compared: Capture with which recorded choices are compared. Among experts with equal scores, the captured ones
            are recorded.
    """

    def __init__(self, inner: Choice | None = None, *, counts_replayed: bool = False):
        self._inner, self.counts_replayed = inner, counts_replayed
        self.routes: LayerRoutes | None = None
        self.compared: LayerRoutes | None = None
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
        assert default_compute_topk is not None  # Megatron-Core always gives one
        if self._inner is None:
            values, live = default_compute_topk(scores, topk, num_groups, group_topk)
        else:
            values, live = self._inner.get_replay_topk(scores, topk, num_groups, group_topk, default_compute_topk)  # type: ignore[arg-type]
        chosen, taken = values, live
        self.counted = None if self._inner is None else live
        if self.routes is not None:
            if self.routes.experts.shape != live.shape:
                got, expected = tuple(self.routes.experts.shape), tuple(live.shape)
                raise ValueError(f"routes to replay: got {got}, expected {expected}")
            taken = replayed(live, self.routes)
            values = scores.gather(1, taken)
            self.counted = taken if self.counts_replayed else live
        if self.shows:
            # A choice within groups, or by `inner`, need not have the highest scores.
            is_plain, margin = self._inner is None and not group_topk, None
            if self.shows_margin:
                margin = self._margins(scores.detach(), topk, num_groups, group_topk, (chosen.detach(), live))
            shown = live if self.compared is None or not is_plain else or_tied(live, scores.detach(), self.compared)
            self.seen.append(RoutedTokens(shown, shown if taken is live else taken, margin))
        return values, taken

    def _margins(
        self,
        scores: Float[Tensor, "tokens experts"],
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        chosen: tuple[Float[Tensor, "tokens topk"], Int[Tensor, "tokens topk"]],
    ) -> Float[Tensor, " tokens"]:
        if num_groups and group_topk and isinstance(self._inner, ChoiceWithMargins):
            return self._inner.margins(scores, topk, num_groups, group_topk)
        return margins(scores, topk, chosen if self._inner is None and not group_topk else None)

    def take(self) -> list[RoutedTokens]:
        """Return the choices recorded since the last call."""
        seen, self.seen = self.seen, []
        return seen


def margins(
    scores: Float[Tensor, "tokens experts"],
    topk: int,
    highest: tuple[Float[Tensor, "tokens topk"], Int[Tensor, "tokens topk"]] | None = None,
) -> Float[Tensor, " tokens"]:
    """Return the score of the last chosen expert minus the best unchosen score, infinite if all are chosen."""
    scores = scores.float()
    if highest is not None:  # cheaper than another top-k
        values, experts = highest
        return values[:, -1].float() - scores.scatter(1, experts, -torch.inf).amax(1)
    if topk >= scores.shape[-1]:
        return torch.full(scores.shape[:1], torch.inf, device=scores.device)
    best = scores.topk(topk + 1, dim=-1).values
    return best[:, topk - 1] - best[:, topk]


def group_limited_margins(
    scores: Float[Tensor, "tokens experts"], topk: int, num_groups: int, group_topk: int, best_of_group: int
) -> Float[Tensor, " tokens"]:
    """Return the margins of a choice that takes experts only from the best groups of experts.

    A margin is the smaller of two differences of scores: last chosen expert minus best unchosen expert in the chosen
    groups, and last chosen group minus best other group.
    """
    of_usable, of_groups = limited_to_groups(scores, num_groups, group_topk, best_of_group)
    return torch.minimum(margins(of_usable, topk), of_groups)


def limited_to_groups(
    scores: Float[Tensor, "tokens experts"], num_groups: int, group_topk: int, best_of_group: int
) -> tuple[Float[Tensor, "tokens experts"], Float[Tensor, " tokens"]]:
    """Return the scores with minus infinity outside the best groups, and the margin of the last of these groups.

    The score of a group is the sum of its `best_of_group` highest scores.
    """
    by_group = scores.float().unflatten(1, (num_groups, -1))
    group_scores = by_group.topk(best_of_group, dim=-1).values.sum(-1)
    usable = torch.zeros_like(group_scores, dtype=torch.bool)
    usable.scatter_(1, group_scores.topk(group_topk, dim=-1).indices, True)
    return by_group.masked_fill(~usable.unsqueeze(-1), -torch.inf).flatten(1), margins(group_scores, group_topk)


def experts_as_map(experts: Int[Tensor, "tokens topk"], num_experts: int) -> Bool[Tensor, "tokens experts"]:
    of_tokens = torch.zeros(len(experts), num_experts, dtype=torch.bool, device=experts.device)
    return of_tokens.scatter_(1, experts, True)
