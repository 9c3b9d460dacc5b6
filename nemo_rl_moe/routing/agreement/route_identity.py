# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Identity of captured routes: whether the experts of each row belong to the row's layer, token and sequence.

Counts of rows cannot show this. So the captured routes of a few sequences are compared with the routers' choices at
their own position, in every other layer, at the neighbouring tokens, and in the other sequences. Another layer, token
or sequence is reported if it agrees better than the right one, and beyond chance.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple

import numpy as np

from nemo_rl_moe.routing.agreement.expert_ids import ExpertCounts, Renumbering, find_renumbering
from nemo_rl_moe.shapes import Float, Int

AnomalyKind = Literal[
    "rows",
    "layer",
    "ids",
    "token",
    "sequence",
    "unrelated",
    "repeated",
    "rank",
    "path",
    "turn_end",
    "exact",
    "indexer",
    "logprobs",
]
SHIFTS = (-1, 0, 1)
_LEAST_LEAD, _SIGMAS = 0.1, 6.0
_MOST_LAYERS = 4
_LEAST_MOVED = 4
_OWN = 0.5
"""A sequence's routes are not its own if their `ownership` is below this value minus `least_lead`."""


LEAST_KAPPA = 0.5
"""Least agreement beyond chance of captured routes with the routers to which they belong, if the weights are the same.
If layers, tokens or sequences were exchanged, it is above 0.9 with the right ones."""


@dataclass(frozen=True)
class RouteSample:
    """Routes of a few sequences in windows of successive tokens. Unknown rows are `UNKNOWN` (-1)."""

    capture: Int[np.ndarray, "sequences tokens layers topk"]
    live: Int[np.ndarray, "sequences tokens layers topk"]


@dataclass(frozen=True)
class RoutingAnomaly:
    kind: AnomalyKind
    text: str
    layer: int | None = None


class OneHot:
    """A sample as one-hot vectors over experts, computed once for all comparisons. float32 counts experts exactly.

    The vector of a token in a layer is 0 if its experts are unknown or contain an expert twice.

    Attributes:
        has_live: Whether the routers' choice is known, `[sequences, tokens, layers]`.
    """

    def __init__(self, sample: RouteSample, num_experts: int):
        routes = np.stack([sample.capture, sample.live])
        *rows, self.topk = routes.shape
        within = routes.clip(0, num_experts - 1)
        hot = np.zeros((prod(rows), num_experts), dtype=np.float32)
        hot[np.arange(len(hot))[:, None], within.reshape(-1, self.topk)] = (within == routes).reshape(-1, self.topk)
        usable = hot @ np.ones(num_experts, dtype=np.float32) == self.topk
        hot[~usable] = 0
        usable = usable.reshape(rows)
        self.both: Float[np.ndarray, "2 sequences tokens layers experts"] = hot.reshape(*rows, num_experts)
        self.capture, self.live = self.both
        self.num_named, self.has_live = usable[0] * np.float32(self.topk), usable[1]

    def forget(self, layers: Sequence[int]) -> None:
        self.capture[:, :, layers] = 0
        self.num_named[:, :, layers] = 0


class Overlap(NamedTuple):
    share: Float[np.ndarray, "rows partners"]
    chance: Float[np.ndarray, "rows partners"]


def _may_belong_elsewhere(hot: OneHot) -> bool:
    """Return False if every layer and every sequence agrees so well with its own routes that none can be exchanged."""
    counts = np.stack([np.einsum("stle,stle->stl", hot.capture, hot.live), hot.num_named * hot.has_live])
    matches, known = np.concatenate([counts.sum((1, 2)), counts.sum((2, 3))], 1)
    return bool((_share(matches, known) <= 1 - _LEAST_LEAD).any())


def layer_overlap(sample: RouteSample, num_experts: int) -> Float[np.ndarray, "layers layers"]:
    """Return the share of layer `i`'s captured experts that layer `j`'s routers would choose for the same token.

    Rows of layers without known routes are NaN.
    """
    return _layer_overlap(OneHot(sample, num_experts)).share


def _layer_overlap(hot: OneHot) -> Overlap:
    capture, live = (of.transpose(2, 0, 1, 3) for of in (hot.capture, hot.live))
    capture = capture * hot.has_live.transpose(2, 0, 1)[..., None]
    popularity = _share(live.sum((1, 2)), hot.has_live.sum((0, 1))[:, None])
    flat = capture.reshape(len(capture), -1)
    known = flat.sum(1, keepdims=True)
    matches = flat @ live.reshape(len(live), -1).T
    return Overlap(_share(matches, known), _share(capture.sum((1, 2)) @ popularity.T, known))


def shift_overlap(hot: OneHot) -> Overlap:
    """Return the share of a sequence's captured experts that routers would choose for the tokens at other positions.

    The result has a row per sequence and a column per distance in `SHIFTS`: the token before, the same, the next. If
    the captured routes are one token late, the first column is the highest.
    """
    length, columns = hot.capture.shape[1], []
    for shift in SHIFTS:
        # Positions whose partner is also in the window, and the partners.
        here, there = slice(max(0, -shift), length - max(0, shift)), slice(max(0, shift), length - max(0, -shift))
        matches = (hot.capture[:, here] * hot.live[:, there]).sum((1, 2, 3))
        columns.append(_share(matches, (hot.num_named[:, here] * hot.has_live[:, there]).sum((1, 2))))
    # The sequence's experts are equally popular at the neighbouring positions.
    of_own = sequence_overlap(hot).chance.diagonal()
    return Overlap(np.stack(columns, 1), np.repeat(of_own[:, None], len(SHIFTS), 1))


def sequence_overlap(hot: OneHot) -> Overlap:
    """Return the share of sequence `i`'s captured experts that routers choose at the same positions of sequence `j`."""
    number = len(hot.capture)
    matches = hot.capture.reshape(number, -1) @ hot.live.reshape(number, -1).T
    known = hot.num_named.reshape(number, -1) @ hot.has_live.reshape(number, -1).T
    popularity = np.nan_to_num(_share(hot.live.sum(1), hot.has_live.sum(1)[..., None]))
    named = hot.capture.sum(1).reshape(number, -1)
    chance = _share(named @ popularity.reshape(number, -1).T, named.sum(1, keepdims=True))
    return Overlap(_share(matches, known), chance)


def ownership(hot: OneHot) -> tuple[Float[np.ndarray, " sequences"], Int[np.ndarray, " sequences"]]:
    """Return by how much better each sequence's captured routes agree with its own routers' choices than with those for
    other sequences (1 if all routes are its own, near 0 if none), and the number of compared rows.

    Routes of another step or response agree a little with every sequence: texts begin alike, and some experts are
    popular. So a row counts only if the routers choose differently for another sequence at the same position. The
    ownership is `sum(own - other) / sum(topk - common)` over these rows: `own` is the number of captured experts in the
    choice for the row's own sequence, `other` the number in the choice for the other sequence, and `common` the number
    of experts in both choices.
    """
    # Pairs of a sequence and another one, at all positions at once.
    found, common = hot.both.transpose(0, 2, 3, 1, 4) @ hot.live.transpose(1, 2, 3, 0)
    own = found.diagonal(axis1=-2, axis2=-1)[..., None]
    has_live = hot.has_live.transpose(1, 2, 0)
    known = has_live & (hot.num_named.transpose(1, 2, 0) > 0)
    differs = known[..., None] & has_live[..., None, :] & (common < hot.topk)
    of_places = np.stack([own - found, hot.topk - common]) * differs
    preferred, most = of_places.sum((1, 2)).sum(-1, dtype=np.float64)
    return _share(preferred, most), differs.any(-1).sum((0, 1))


def _share(matches: Float[np.ndarray, "*shape"], known: Float[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
    with np.errstate(invalid="ignore", divide="ignore"):
        share: Float[np.ndarray, "*shape"] = matches / known
    return share


def find_anomalies(
    sample: RouteSample,
    num_experts: int,
    layers: Sequence[int],
    sequences: Sequence[str] = (),
    counts: Int[np.ndarray, "kinds layers experts"] | None = None,
    *,
    same_weights: bool = True,
) -> list[RoutingAnomaly]:
    """Report captured rows that belong to another layer, token or sequence, or whose ids mean other experts.

    Captured rows belong to another layer, token or sequence if they agree better with the routers' choices there than
    with the choices for themselves, by at least 0.1 and by at least six standard errors of a share. In addition, their
    agreement there, corrected for chance (kappa), must be at least 0.5.

    Args:
        same_weights: Whether the weights in training chose the captured experts. If not, a sequence with little
            agreement is no anomaly, nor are fewer than `_LEAST_MOVED` renumbered ids of a layer: updates can let
            routers replace one popular expert by another.
    """
    names = list(sequences) or [str(number) for number in range(len(sample.capture))]
    hot = OneHot(sample, num_experts)
    found: list[RoutingAnomaly] = []
    renumbered = {
        place: of_layer
        for place, of_layer in _renumbered(hot, counts).items()
        if same_weights or len(of_layer.router_ids) >= _LEAST_MOVED
    }
    elsewhere: list[int] = []
    if _may_belong_elsewhere(hot):
        by_layer = _layer_overlap(hot)
        for place, other in _winners(by_layer, np.arange(len(layers)), (hot.num_named > 0).sum((0, 1))):
            if place in renumbered and by_layer.share[place, other] < (renumbered[place].after or 0):
                continue
            text = f"layer {layers[place]} carries layer {layers[other]}'s routes"
            compared = _compared(by_layer.share[place], place, other)
            found.append(RoutingAnomaly("layer", f"{text}: {compared}", int(layers[place])))
            elsewhere.append(place)
    found += _of_ids({place: renumbered[place] for place in renumbered if place not in elsewhere}, layers)
    hot.forget([*elsewhere, *renumbered])  # rows of other layers and ids agree with no other token or sequence either
    return found + _of_tokens_and_sequences(hot, names, same_weights=same_weights)


def _renumbered(hot: OneHot, counts: Int[np.ndarray, "kinds layers experts"] | None) -> dict[int, Renumbering]:
    """Return the renumbering of each layer whose expert ids are renumbered, by the layer's position."""
    if counts is None:
        both = (hot.capture * hot.has_live[..., None], hot.live * (hot.num_named > 0)[..., None])
        counts = np.stack([of.sum((0, 1)) for of in (*both, hot.capture * hot.live)]).round().astype(np.int64)
    found = {}
    for place in range(hot.capture.shape[2]):
        of_layer = find_renumbering(hot.capture[:, :, place], hot.live[:, :, place], ExpertCounts(*counts[:, place]))
        if of_layer is not None:
            found[place] = of_layer
    return found


def _of_ids(renumbered: Mapping[int, Renumbering], layers: Sequence[int]) -> list[RoutingAnomaly]:
    texts = [f"layer {layers[place]}: {of_layer.text}" for place, of_layer in renumbered.items()]
    if len(texts) == 1:
        return [RoutingAnomaly("ids", texts[0], int(layers[next(iter(renumbered))]))]
    more = f"; and {len(texts) - _MOST_LAYERS} more layers" if len(texts) > _MOST_LAYERS else ""
    return [RoutingAnomaly("ids", "; ".join(texts[:_MOST_LAYERS]) + more)] if texts else []


def _of_tokens_and_sequences(hot: OneHot, names: Sequence[str], *, same_weights: bool) -> list[RoutingAnomaly]:
    if not _may_belong_elsewhere(hot):
        return _strangers(hot, names, named=set()) if same_weights else []
    found: list[RoutingAnomaly] = []
    per_sequence = (hot.num_named > 0).sum((1, 2))
    by_shift = shift_overlap(hot)
    shifted = dict(_winners(by_shift, np.full(len(names), SHIFTS.index(0)), per_sequence))
    for shift, word in ((-1, "late"), (1, "early")):
        late = [place for place, winner in shifted.items() if SHIFTS[winner] == shift]
        if late:
            of = "" if len(late) == len(names) else f" in sequence{'s' if len(late) > 1 else ''} {_named(late, names)}"
            compared = _compared(by_shift.share[late[0]], SHIFTS.index(0), SHIFTS.index(shift))
            found.append(RoutingAnomaly("token", f"routes are one token {word}{of}: {compared}"))
    by_sequence = sequence_overlap(hot)
    swapped = {
        place: other
        for place, other in _winners(by_sequence, np.arange(len(names)), per_sequence)
        if place not in shifted
    }
    for place, other in swapped.items():
        text = f"sequence {names[place]} carries the routes of sequence {names[other]}"
        found.append(RoutingAnomaly("sequence", f"{text}: {_compared(by_sequence.share[place], place, other)}"))
    return found + (_strangers(hot, names, named=shifted.keys() | swapped.keys()) if same_weights else [])


def _strangers(hot: OneHot, names: Sequence[str], named: AbstractSet[int]) -> list[RoutingAnomaly]:
    """Report the sequences, except `named`, whose routes belong to no sampled sequence."""
    values, rows = ownership(hot)
    with np.errstate(invalid="ignore"):
        strange = np.flatnonzero(values < _OWN - least_lead(rows))
    found = [place for place in strange.tolist() if place not in named]
    if not found:
        return []
    own, others = (f"{number} of the experts" for number in _agreement_of(hot, found))
    whose = f"sequence{'s' if len(found) > 1 else ''} {_named(found, names)}"
    text = f"the routes of {whose} are not {'their' if len(found) > 1 else 'its'} own: they agree"
    return [RoutingAnomaly("sequence", f"{text} with the routers in {own}, for other sequences in {others}")]


def _agreement_of(hot: OneHot, places: Sequence[int]) -> tuple[str, str]:
    """Return the mean agreement of captured routes with the routers' choices for the same sequence, and for others."""
    overlap = sequence_overlap(hot).share[places]
    is_same = np.zeros(overlap.shape, dtype=bool)
    is_same[np.arange(len(places)), places] = True
    return f"{np.nanmean(overlap[is_same]):.3f}", f"{np.nanmean(overlap[~is_same]):.3f}"


def least_lead(counts: Int[np.ndarray, "*rows"]) -> Float[np.ndarray, "*rows"]:
    """Return the smallest significant difference of shares of `counts` rows: 0.1 or, if larger, six standard errors."""
    lead: Float[np.ndarray, "*rows"] = np.maximum(_LEAST_LEAD, _SIGMAS * 0.5 / np.sqrt(np.maximum(counts, 1)))
    return lead


def foreign_capture(slot_kappa: float | None) -> list[RoutingAnomaly]:
    """Report a capture of different tokens, such as the previous step's, if the kappa over all rows shows it."""
    if slot_kappa is None or slot_kappa >= LEAST_KAPPA:
        return []
    text = f"the routes are not those of these tokens: their agreement with routers beyond chance is {slot_kappa:.3f}"
    return [RoutingAnomaly("sequence", f"{text}, that of right routes above {LEAST_KAPPA}")]


def _winners(
    overlap: Overlap, right: Int[np.ndarray, " rows"], counts: Int[np.ndarray, " rows"]
) -> list[tuple[int, int]]:
    """Return (row, highest column) of each row of an overlap in which a column other than `right` is clearly higher."""
    share, chance = overlap
    rows = np.arange(len(share))
    # In a row without known routes no column wins.
    best = np.where(np.isnan(share), -1.0, share).argmax(1)
    beyond_chance = share[rows, best] - chance[rows, best] >= LEAST_KAPPA * (1 - chance[rows, best])
    with np.errstate(invalid="ignore"):
        wins = beyond_chance & (share[rows, best] - share[rows, right] > least_lead(counts))
    return [(row, int(best[row])) for row in np.flatnonzero(wins).tolist()]


def _compared(shares: Float[np.ndarray, " partners"], right: int, best: int) -> str:
    return f"they agree with routers there in {shares[best]:.3f} of the experts, with their own in {shares[right]:.3f}"


def _named(places: Sequence[int], names: Sequence[str]) -> str:
    return ", ".join(names[place] for place in places[:8]) + (f" and {len(places) - 8} more" if len(places) > 8 else "")
