# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Detection of renumbered experts: captured ids of a layer that are a permutation of its router's ids.

An engine that reports physical instead of logical ids of an expert-parallel load balancer permutes an entire layer.
Weights that were converted with two experts exchanged permute two ids. Every row is well-formed, the loads look alike,
and no other layer, token or sequence agrees better. But one renumbering of the ids makes the layer agree.

Only ids that seldom agree over all rows of the step are searched. A captured id and a router's id are reported as
partners if they are paired in both halves of a sample, which have different sequences.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from nemo_rl_moe.shapes import Bool, Float, Int

_MOST_KAPPA = 0.75
"""Highest agreement beyond chance (kappa), over all rows, of an expert id that may be renumbered."""
_LEAST_AFTER, _LEAST_KAPPA_AFTER = 0.75, 0.5
"""Least agreement of ids after renumbering, as a share and beyond chance (kappa)."""
_LEAST_LEAD, _SIGMAS = 0.1, 6.0
_CLEAR_LEAD = 0.5
"""Gain in agreement, as a share, from which a cycle of ids counts as renumbered even if it has few rows."""
_LEAST_ROWS, _LEAST_OF_EITHER, _MOST_AGREED = 36, 12, 0.25
"""Limits for two ids that their counts alone show as exchanged: least tokens with each id, least tokens with it in the
capture and in the router's choice each, and highest share of tokens with both."""
_MOST_NAMED = 4


@dataclass(frozen=True)
class Renumbering:
    """Permutation of the expert ids of one layer.

    Attributes:
        router_ids: Captured id -> router's id, for ids that differ and are known.
        before: Share of the captured experts that the router chooses. If `after` is None, only renumbered ids count.
        after: The same share after renumbering. None if the sample has too few rows.
    """

    router_ids: Mapping[int, int]
    before: float
    after: float | None

    @property
    def text(self) -> str:
        """Description that follows the name of the layer in a message."""
        named = [f"{captured}->{own}" for captured, own in sorted(self.router_ids.items())]
        more = [f"and {len(named) - _MOST_NAMED} more"] if len(named) > _MOST_NAMED else []
        text = f"captured expert ids are a permutation of the router's ({', '.join(named[:_MOST_NAMED] + more)})"
        if self.after is None:
            return f"{text}: the router chooses these in {self.before:.3f} of their rows"
        return f"{text}: agreement {self.before:.3f} becomes {self.after:.3f} after renumbering"


@dataclass(frozen=True)
class ExpertCounts:
    """Numbers of tokens of one layer in a step, per expert: captured, chosen by the router, and both."""

    captured: Int[np.ndarray, " experts"]
    live: Int[np.ndarray, " experts"]
    agreed: Int[np.ndarray, " experts"]

    def seldom_agree(self, topk: int) -> tuple[Int[np.ndarray, " some"], Int[np.ndarray, " others"]]:
        """Return captured ids that the router seldom chooses for the same tokens, and the router's ids that are seldom
        captured for the same tokens."""
        rows = max(self.captured.sum() / topk, 1)
        found = []
        for counts, others in ((self.captured, self.live), (self.live, self.captured)):
            chance = np.minimum(others / rows, 1)
            # Cohen's kappa of an id, without its denominator.
            is_low = self.agreed - chance * counts < _MOST_KAPPA * (1 - chance) * counts
            found.append(np.flatnonzero(is_low))
        return found[0], found[1]

    def exchanged(self) -> dict[int, int]:
        """Return {one: other, other: one} if only two ids disagree, and the router chooses each about as often as the
        other is captured. Otherwise return an empty dictionary.
        """
        most = np.maximum(self.captured, self.live)
        (found,) = np.nonzero((most >= _LEAST_ROWS) & (self.agreed <= _MOST_AGREED * most))
        others = np.delete(np.stack([self.agreed, self.captured]), found, 1).sum(1)
        if len(found) != 2 or others[0] < _LEAST_AFTER * others[1]:
            return {}
        captured, live = self.captured[found], self.live[found][::-1]
        fewest = np.minimum(captured, live)
        # If one text is repeated, a near tie yields many rows with one of the ids and none with the other.
        if (fewest < _LEAST_OF_EITHER).any() or (np.abs(captured - live) > _LEAST_LEAD * fewest).any():
            return {}
        one, other = found.tolist()
        return {one: other, other: one}


def find_renumbering(
    captured: Float[np.ndarray, "sequences tokens experts"],
    live: Float[np.ndarray, "sequences tokens experts"],
    counts: ExpertCounts,
) -> Renumbering | None:
    """Return the renumbering of one layer's ids that explains its disagreement, if any."""
    known: Bool[np.ndarray, "sequences tokens"] = np.logical_and(captured.any(-1), live.any(-1))
    if not known.any():
        return None
    topk = round(float(captured[known][0].sum()))
    ids = counts.seldom_agree(topk)
    if not all(map(len, ids)):
        return None
    of_halves = [_Together.of(captured[half], live[half], ids) for half in _halves(known)]
    together = _Together.sum(of_halves)
    router_ids = together.partners()
    for half in of_halves:
        of_half = half.partners()
        router_ids = {one: other for one, other in router_ids.items() if of_half.get(one) == other}
    router_ids = _explained(router_ids, together, counts)
    if router_ids:
        router_ids = _closed(router_ids, counts)
        return Renumbering(router_ids, *_agreement(captured[known], live[known], router_ids))
    if router_ids := counts.exchanged():
        moved = list(router_ids)
        return Renumbering(router_ids, float(counts.agreed[moved].sum() / counts.captured[moved].sum()), None)
    return None


@dataclass(frozen=True)
class _Together:
    """Number of sampled tokens with each captured id, with each id chosen by the router, and with each pair of them."""

    ids: tuple[Int[np.ndarray, " some"], Int[np.ndarray, " others"]]
    both: Float[np.ndarray, "some others"]
    captured: Float[np.ndarray, " some"]
    live: Float[np.ndarray, " others"]
    itself: Float[np.ndarray, " some"]
    itself_live: Float[np.ndarray, " some"]
    rows: int

    @classmethod
    def of(
        cls,
        captured: Float[np.ndarray, "rows experts"],
        live: Float[np.ndarray, "rows experts"],
        ids: tuple[Int[np.ndarray, " some"], Int[np.ndarray, " others"]],
    ) -> "_Together":
        """Count tokens (rows) with the captured ids `ids[0]`, with the router's ids `ids[1]`, and with each pair."""
        named, chosen, same = captured[:, ids[0]], live[:, ids[1]], live[:, ids[0]]
        return cls(
            ids, named.T @ chosen, named.sum(0), chosen.sum(0), (named * same).sum(0), same.sum(0), len(captured)
        )

    @classmethod
    def sum(cls, parts: list["_Together"]) -> "_Together":
        names = ("both", "captured", "live", "itself", "itself_live", "rows")
        return cls(parts[0].ids, *(np.sum([getattr(part, name) for part in parts], 0) for name in names))

    def partners(self) -> dict[int, int]:
        """Return captured id -> router's id, for pairs of different ids that are each other's single best partner.

        The overlap of two ids is the number of tokens with both ids over the number of tokens with either id. Without
        the division, popular experts would have the largest overlaps. The best partner of an id has the largest overlap
        with it. The overlap of a pair must exceed, by `_LEAST_LEAD`, the overlap of the captured id with the same id of
        the router.
        """
        overlap = _overlap(self.both, self.captured[:, None], self.live)
        itself = _overlap(self.itself, self.captured, self.itself_live)
        best = (overlap == overlap.max(1, keepdims=True)) & (overlap == overlap.max(0))
        best &= overlap > itself[:, None] + _LEAST_LEAD
        only = best & (_num_highest(overlap, 1)[:, None] == 1) & (_num_highest(overlap, 0) == 1)
        return {int(self.ids[0][row]): int(self.ids[1][column]) for row, column in zip(*np.nonzero(only), strict=True)}

    def under(self, router_ids: Mapping[int, int]) -> "_Renumbered":
        """Return the agreement of captured ids with the router's ids to which `router_ids` maps them."""
        rows = np.searchsorted(self.ids[0], list(router_ids))
        columns = np.searchsorted(self.ids[1], list(router_ids.values()))
        captured = self.captured[rows]
        total = float(captured.sum())
        by_chance = float(captured @ self.live[columns]) / self.rows
        return _Renumbered(float(self.both[rows, columns].sum()) / total, by_chance / total, total)


class _Renumbered(NamedTuple):
    """Agreement of renumbered ids: share of their tokens for which the router chooses the new id, the share by chance,
    and the number of these tokens.
    """

    share: float
    chance: float
    rows: float

    @property
    def is_beyond_chance(self) -> bool:
        return self.share - self.chance >= _LEAST_KAPPA_AFTER * (1 - self.chance)


def _overlap(both: np.ndarray, some: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return the number of tokens with both ids over the number of tokens with either id."""
    overlap: np.ndarray = both / np.maximum(some + others - both, 1)
    return overlap


def _num_highest(values: Float[np.ndarray, "some others"], axis: int) -> Int[np.ndarray, " rest"]:
    found: Int[np.ndarray, " rest"] = (values == values.max(axis, keepdims=True)).sum(axis)
    return found


def _halves(known: Bool[np.ndarray, "sequences tokens"]) -> tuple[Bool[np.ndarray, "sequences tokens"], ...]:
    """Split known rows in two by sequence, since a sequence may repeat a text. A single sequence is split by token."""
    numbers = np.cumsum(known.any(1))[:, None] if known.any(1).sum() > 1 else np.arange(known.shape[1])
    return known & (numbers % 2 == 0), known & (numbers % 2 == 1)


def _explained(router_ids: Mapping[int, int], together: _Together, counts: ExpertCounts) -> dict[int, int]:
    """Return only the cycles of a renumbering that make its ids agree clearly better, and beyond chance."""
    found: dict[int, int] = {}
    for chain in _chains(router_ids):
        after = together.under(chain)
        gain = after.share - _agreed_share(chain, counts)
        if after.is_beyond_chance and (gain >= _CLEAR_LEAD or gain >= _lead(after.rows)):
            found |= chain
    if not found:
        return {}
    after = together.under(found)
    gain = after.share - _agreed_share(found, counts)
    return found if after.share >= _LEAST_AFTER and gain >= _lead(after.rows) else {}


def _closed(router_ids: Mapping[int, int], counts: ExpertCounts) -> dict[int, int]:
    """Return the renumbering. A single open chain of ids is closed (last id -> first id) if the last id is captured
    about as often as the router chooses the first id."""
    (*starts,) = router_ids.keys() - set(router_ids.values())
    (*ends,) = set(router_ids.values()) - router_ids.keys()
    if len(starts) != 1:
        return dict(router_ids)
    captured, live = int(counts.captured[ends[0]]), int(counts.live[starts[0]])
    is_as_frequent = abs(captured - live) <= _LEAST_LEAD * max(captured, live)
    return {**router_ids, ends[0]: starts[0]} if is_as_frequent else dict(router_ids)


def _agreed_share(router_ids: Mapping[int, int], counts: ExpertCounts) -> float:
    """Return the share of the captured experts with an id in `router_ids` that the router also chooses.

    Ids are compared without renumbering, in all rows of the step.
    """
    ids = sorted(router_ids.keys() | set(router_ids.values()))
    return float(counts.agreed[ids].sum() / max(counts.captured[ids].sum(), 1))


def _lead(rows: float) -> float:
    """Return the smallest significant difference of shares of `rows` rows: 0.1 or, if larger, six standard errors."""
    return max(_LEAST_LEAD, _SIGMAS * 0.5 / rows**0.5)


def _chains(router_ids: Mapping[int, int]) -> Iterator[dict[int, int]]:
    """Yield the cycles of a permutation. If it is only partly known, also yield the known pieces of cycles."""
    left = dict(router_ids)
    targets = set(router_ids.values())
    for start in sorted(router_ids, key=lambda one: (one in targets, one)):  # a piece from its beginning
        chain: dict[int, int] = {}
        one = start
        while one in left:
            chain[one] = left.pop(one)
            one = chain[one]
        if chain:
            yield chain


def _agreement(
    captured: Float[np.ndarray, "rows experts"], live: Float[np.ndarray, "rows experts"], router_ids: Mapping[int, int]
) -> tuple[float, float]:
    """Return the share of the captured experts that the router chooses, before and after renumbering."""
    renumbered = captured.copy()
    moved = list(router_ids)
    renumbered[:, sorted({*moved, *router_ids.values()})] = 0
    renumbered[:, list(router_ids.values())] = captured[:, moved]
    total = captured.sum()
    return float((captured * live).sum() / total), float((renumbered * live).sum() / total)
