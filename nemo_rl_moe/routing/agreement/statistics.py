# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Agreement statistics of captured routes: the kinds of rows, and how far they agree with the routers in training.

A capture contains the experts that another pass, such as the rollout, chose: a row for each token in each MoE layer.
Everything is counted on the device without host synchronisation. The counts have the same shape on every rank, so that
one collective adds them up.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf, nan

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_moe.routing.agreement.route_identity import RoutingAnomaly
from nemo_rl_moe.routing.agreement.row_kinds import MARGIN_EDGES, Row
from nemo_rl_moe.routing.metrics.expert_load_recorder import sum_over_ranks
from nemo_rl_moe.routing.replay import ReplayRoutes, RoutedTokens, all_of, in_planes, named_too, num_in_common
from nemo_rl_moe.shapes import Bool, Float, Int

_COMPARED, _DIFFERS = 1, 2
_NARROW = MARGIN_EDGES.index(1e-2)


def classify_rows(routes: ReplayRoutes, fed: Bool[Tensor, " tokens"]) -> dict[Row, Bool[Tensor, "*layers tokens"]]:
    """Return a mask for each kind of captured row (the experts of one token in one layer), such as missing rows."""
    planes, unknown, in_range, usable, _ = routes
    zero = all_of(planes == 0) & ~usable
    return {
        Row.EXPECTED: fed.expand_as(usable),
        Row.USABLE: usable & fed,
        Row.MISSING: unknown & fed,
        Row.ZERO: zero & fed,
        Row.DUPLICATED: in_range & ~usable & ~zero & fed,
        Row.OUT_OF_RANGE: ~in_range & ~unknown & fed,
        Row.UNEXPECTED: usable & ~fed,
    }


class AgreementStatistics:
    """Agreement counts of one step of training on one rank.

    Attributes:
        rows: Number of captured rows of each kind (`Row`) in each MoE layer.
        margins: Number of usable rows, and of rows that differ from the router, by class of the router's margin:
            `[layers, classes, 2]`.
    """

    def __init__(self, num_layers: int, num_experts: int, device: torch.device):
        self._num_experts = num_experts
        counted = {"dtype": torch.long, "device": device}
        self.rows: Int[Tensor, "layers kinds"] = torch.zeros(num_layers, len(Row), **counted)  # type: ignore[call-overload]
        self._experts = torch.zeros(3 * num_layers * num_experts, **counted)  # type: ignore[call-overload]
        self.captured_experts, self.live_experts, self.agreed_experts = self._experts.view(3, num_layers, num_experts)
        self.margins: Int[Tensor, "layers classes 2"] = torch.zeros(num_layers, len(MARGIN_EDGES) + 1, 2, **counted)  # type: ignore[call-overload]
        self.tokens: dict[int, Int[Tensor, " tokens"]] = {}
        self._edges = torch.tensor(MARGIN_EDGES, device=device)[:, None, None]
        self._last_layers: Int[Tensor, " layers"] | None = None

    def clear(self) -> None:
        for counts in (self.rows, self._experts, self.margins):
            counts.zero_()
        self.tokens.clear()

    def add(
        self,
        number: int | Mapping[int, int],
        layers: Int[Tensor, " layers"],
        routes: ReplayRoutes,
        fed: Bool[Tensor, " tokens"],
        seen: Sequence[RoutedTokens],
    ) -> Int[Tensor, "topk layers tokens"] | None:
        """Count the rows of a forward pass of some layers over one or several microbatches.

        Return the routers' choices in the layout of `in_planes`. None if no choices were recorded.

        Args:
            number: Index of the microbatch in the step, the same on all pipeline stages. For several microbatches:
                index -> number of tokens.
        """
        tokens = {number: len(fed)} if isinstance(number, int) else number
        for each, count in tokens.items():
            if each not in self.tokens:
                self.tokens[each] = torch.zeros(count, dtype=torch.uint8, device=fed.device)
        if not len(layers):
            return None
        self._find_places(layers)
        kinds: dict[Row, Tensor] = dict(classify_rows(routes, fed))
        usable, named = kinds[Row.USABLE], [routes.planes]
        counts = [usable.view(torch.uint8).expand(routes.planes.shape)]
        live = None
        if seen:
            live = in_planes(torch.stack([of_layer.live for of_layer in seen]).transpose(0, 1), self._num_experts)
            agreed = named_too(routes.planes, live) * usable
            kinds |= self._compare(tokens, layers, routes, live, agreed.sum(0, dtype=torch.uint8), usable, seen)
            named += [live, routes.planes]
            counts += [counts[0], agreed]
        # Rows that do not count may hold any id.
        places = torch.stack(named).clamp_(0, self._num_experts - 1) + self._places_of_experts[: len(named)]
        self._experts.scatter_add_(0, places.view(-1), torch.stack(counts).view(-1).long())
        of_kinds = torch.stack([kinds[kind].view(torch.uint8) for kind in Row if kind in kinds])
        # A sum in 32 bits takes a twentieth of the time of one in 64 bits on a CPU.
        counted = of_kinds.sum(-1, dtype=torch.int32).long()
        self.rows[:, : len(kinds)].index_add_(0, layers, counted.T)
        return live

    def _compare(
        self,
        tokens: Mapping[int, int],
        layers: Int[Tensor, " layers"],
        routes: ReplayRoutes,
        live: Int[Tensor, "topk layers tokens"],
        slots: Int[Tensor, "layers tokens"],
        usable: Bool[Tensor, "layers tokens"],
        seen: Sequence[RoutedTokens],
    ) -> dict[Row, Tensor]:
        """Return masks of agreeing rows, and the number of agreeing experts per row.

        Also count rows by margin of the router, and mark tokens as compared and as different.
        """
        live_same = taken_same = slots == len(live)
        if any(of_layer.taken is not of_layer.live for of_layer in seen):
            taken = in_planes(torch.stack([of_layer.taken for of_layer in seen]).transpose(0, 1), self._num_experts)
            taken_same = (num_in_common(routes.planes, taken) == len(taken)) & usable
        differs = usable & ~live_same
        # A token gets the largest mark of all layers.
        of_layers = torch.add(usable.view(torch.uint8), differs.view(torch.uint8), alpha=_DIFFERS)  # usable: _COMPARED
        for number, marks in zip(tokens, of_layers.amax(0).split(list(tokens.values())), strict=True):
            self.tokens[number] |= marks
        if all(of_layer.margin is not None for of_layer in seen):
            margin = torch.stack([of_layer.margin for of_layer in seen if of_layer.margin is not None])
            self.margins.index_add_(0, layers, self._classes(margin, torch.stack([usable, differs])).permute(2, 0, 1))
        return {Row.TAKEN_SAME: taken_same, Row.LIVE_SAME: live_same, Row.LIVE_SLOTS: slots}

    def _classes(
        self, margin: Float[Tensor, "layers tokens"], of_kinds: Bool[Tensor, "2 layers tokens"]
    ) -> Int[Tensor, "classes 2 layers"]:
        """Return the number of tokens in each class of margin: above the lower bound, minus above the upper bound."""
        above = ((margin > self._edges)[:, None] & of_kinds).sum(-1, dtype=torch.int32)
        everywhere = of_kinds.sum(-1, dtype=torch.int32)[None]
        return torch.cat([everywhere, above, torch.zeros_like(everywhere)]).diff(dim=0).neg_().long()

    def _find_places(self, layers: Int[Tensor, " layers"]) -> None:
        """Set `_places_of_experts` for some layers, unless it was last set for the same ones."""
        if layers is self._last_layers:
            return
        self._last_layers = layers
        # First the counts by the capture, then by the routers, then by both.
        of_kinds = torch.arange(3, device=layers.device)[:, None]
        self._places_of_experts = ((of_kinds * len(self.rows) + layers) * self._num_experts)[:, None, :, None]

    def reduced(self, stages: dist.ProcessGroup | None = None) -> "AgreementTotals":
        """Return the sums over all ranks. A collective.

        Pipeline stages first share which tokens differ in some layer, so that each token counts once.
        """
        # One mark more than tokens, so that a rank without tokens can join the collective.
        marks = torch.cat([self.rows.new_zeros(1).to(torch.uint8), *(self.tokens[key] for key in sorted(self.tokens))])
        reports = True
        if stages is not None and dist.get_world_size(stages) > 1:
            # A token that differs is also compared, so its mark is the largest of all stages.
            dist.all_reduce(marks, op=dist.ReduceOp.MAX, group=stages)
            reports = dist.get_rank(stages) == 0
        # A mark is 0, `_COMPARED`, or `_COMPARED + _DIFFERS`. 32 bits as in `add`.
        tokens = torch.stack([marks >= _COMPARED, marks >= _DIFFERS]).sum(1, dtype=torch.int32) * int(reports)
        parts = [self.rows, self.captured_experts, self.live_experts, self.agreed_experts, self.margins, tokens]
        return AgreementTotals(*(part.long() for part in sum_over_ranks(parts, self.rows.device)))


@dataclass(frozen=True)
class AgreementTotals:
    """Agreement counts of a step over all ranks, on the host."""

    rows: Int[Tensor, "layers kinds"]
    captured_experts: Int[Tensor, "layers experts"]
    live_experts: Int[Tensor, "layers experts"]
    agreed_experts: Int[Tensor, "layers experts"]
    margins: Int[Tensor, "layers classes 2"]
    tokens: Int[Tensor, " 2"]

    @property
    def of_experts(self) -> Int[np.ndarray, "kinds layers experts"]:
        """Number of rows with each expert: in the captured routes, in the routers' choices, and in both."""
        return torch.stack([self.captured_experts, self.live_experts, self.agreed_experts]).numpy()

    @property
    def rows_differing(self) -> float:
        """Share of usable rows whose set of experts the router would not choose. NaN without usable rows."""
        usable, same = (float(self.rows[:, kind].sum()) for kind in (Row.USABLE, Row.LIVE_SAME))
        return 1 - same / usable if usable else nan

    @property
    def tokens_differing(self) -> float:
        """Share of tokens with a usable row for which some router would choose another set. NaN without such tokens."""
        compared, differing = self.tokens.tolist()
        return differing / compared if compared else nan


@dataclass(frozen=True)
class RoutingReport:
    layers: tuple[int, ...]
    totals: AgreementTotals
    metrics: dict[str, float]
    anomalies: tuple[RoutingAnomaly, ...]

    def with_more(self, metrics: Mapping[str, float], anomalies: Sequence[RoutingAnomaly]) -> "RoutingReport":
        """Return the report with further metrics and anomalies."""
        together = (*self.anomalies, *anomalies)
        counted = {"routing/anomalies": float(len(together))}
        return replace(self, metrics={**self.metrics, **metrics, **counted}, anomalies=together)


def slot_chance(totals: AgreementTotals) -> Float[Tensor, " layers"]:
    """Return the share of a token's experts on which capture and router would agree by popularity alone.

    It is `sum_e a_e b_e / k`, where `a_e` and `b_e` are the shares of tokens with expert `e` in the capture and by the
    router. NaN in a layer without usable rows.
    """
    captured, live = (of.numpy().astype(np.float64) for of in (totals.captured_experts, totals.live_experts))
    with np.errstate(invalid="ignore"):
        return torch.from_numpy((captured * live).sum(1) / (totals.rows.numpy()[:, Row.USABLE] * captured.sum(1)))


def agreement_metrics(totals: AgreementTotals, layers: tuple[int, ...], *, per_layer: bool) -> dict[str, float]:
    """Return the metrics of the agreement statistics, under `routing/`. Empty if no row was expected.

    - `rows_*_share`: shares of the expected rows
    - `agreement`: share of usable rows whose set of experts the routers took
    - `live_agreement`: the same for the set that they would choose by themselves
    - `slot_agreement`: share of the captured experts that the routers would choose, and `slot_kappa`: this beyond
      chance (Cohen's kappa, `slot_chance`)
    - `narrow_margin_share`: share of rows whose margin is at most 0.01
    - `flip_margin_median`: upper bound of the class (`MARGIN_EDGES`) with the median margin of the differing rows
    """
    rows = totals.rows.double().tolist()
    sums = [sum(of_kind) for of_kind in zip(*rows, strict=True)]
    expected, usable = sums[Row.EXPECTED], sums[Row.USABLE]
    if not expected:
        return {}
    kinds = (Row.USABLE, Row.MISSING, Row.ZERO, Row.DUPLICATED, Row.OUT_OF_RANGE)
    metrics = {"routing/rows_expected": expected}
    metrics |= {f"routing/rows_{kind.name.lower()}_share": sums[kind] / expected for kind in kinds}
    metrics["routing/rows_unexpected"] = sums[Row.UNEXPECTED]
    compared, differing = totals.tokens.tolist()
    if not compared:
        return metrics
    slots_of_layers = totals.captured_experts.sum(1).tolist()
    slots = sum(slots_of_layers)
    slot_agreement = sums[Row.LIVE_SLOTS] / slots
    by_chance = zip(slots_of_layers, slot_chance(totals).tolist(), strict=True)
    chance = sum(of_layer * share for of_layer, share in by_chance if of_layer) / slots
    metrics |= {
        "routing/agreement": sums[Row.TAKEN_SAME] / usable,
        "routing/live_agreement": sums[Row.LIVE_SAME] / usable,
        "routing/tokens_differing_share": differing / compared,
        "routing/slot_agreement": slot_agreement,
        "routing/slot_kappa": (slot_agreement - chance) / (1 - chance) if chance < 1 else 1.0,
    }
    of_classes, differing_of_classes = totals.margins.sum(0).T.tolist()
    metrics["routing/narrow_margin_share"] = sum(of_classes[: _NARROW + 1]) / usable
    if any(differing_of_classes):
        up_to_class = list(accumulate(differing_of_classes))
        class_of_median = bisect_left(up_to_class, up_to_class[-1] / 2)
        metrics["routing/flip_margin_median"] = (*MARGIN_EDGES, inf)[class_of_median]
    if per_layer:
        for layer, of_layer in zip(layers, rows, strict=True):
            if of_layer[Row.USABLE]:
                metrics[f"routing/live_agreement_layer_{layer}"] = of_layer[Row.LIVE_SAME] / of_layer[Row.USABLE]
    return metrics


_WRONG_ROWS = {
    Row.ZERO: "hold expert 0 alone",
    Row.DUPLICATED: "name an expert twice",
    Row.OUT_OF_RANGE: "name experts that do not exist",
    Row.UNEXPECTED: "belong to padding or to the last token of a sequence",
}


def row_anomalies(totals: AgreementTotals, layers: Sequence[int]) -> list[RoutingAnomaly]:
    """Report rows that no router can choose. Missing rows are not reported, since an engine may have been lost."""
    found = []
    by_kind = totals.rows.T.tolist()
    for kind, words in _WRONG_ROWS.items():
        if wrong := sum(by_kind[kind]):
            numbers = [str(layer) for layer, count in zip(layers, by_kind[kind], strict=True) if count]
            where = "all layers" if len(numbers) == len(layers) else f"layers {', '.join(numbers)}"
            share = f"{wrong:,} of {sum(by_kind[Row.EXPECTED]):,} rows"
            found.append(RoutingAnomaly("rows", f"{share} {words}, in {where}"))
    return found
