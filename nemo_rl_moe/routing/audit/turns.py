# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Routes by turns: sequences without routes by their number of turns, and routes of the last token of a turn.

The token that ends a turn was sampled, but no pass of that turn had it as an input. Its routes come from the request of
the next turn. If routes are joined turn by turn, a filler remains at its position (NeMo-RL#3485). One code path of a
rollout, such as the requests that continue a conversation, may return no routes at all (rllm#756).
"""

from enum import IntEnum

import numpy as np

from nemo_rl_moe.errors import counted
from nemo_rl_moe.routing.agreement.route_identity import RoutingAnomaly, least_lead
from nemo_rl_moe.runs.folder.captured_sequences import UNKNOWN
from nemo_rl_moe.shapes import Bool, Int

MOST_TURNS = 4
"""Sequences with this number of turns or more are counted together."""
_LEAST_SEQUENCES, _FEW, _MANY = 4, 0.5, 0.9
"""Least number of sequences with some number of turns, and shares of them with routes that count as few or many."""
_LEAST_ENDS, _LEAST_ROWS, _BELONG, _SAMPLED = 4, 24, 0.8, 2048


class Place(IntEnum):
    """Kinds of counts that show wrong or missing routes at the ends of turns. Each kind is counted twice: for tokens at
    the end of a turn, and for other tokens before a trained token.
    """

    TOKENS = 0
    FILLER = 1
    """Filler routes: the first experts, or expert 0 alone, in every layer, while the routers of training differ."""
    MISSING = 2
    ROWS = 3
    """Number of tokens x layers with routes of rollout and training. `SAME` is in how many both are equal."""
    SAME = 4


class TurnCounts:
    """Counts of one step: routes at the ends of turns and elsewhere, and sequences with routes.

    Attributes:
        places: Counts by `Place`, first of tokens at ends of turns, then of other tokens.
        sequences: By number of turns: number of all sequences, and of sequences with routes.
    """

    def __init__(self) -> None:
        self.places: Int[np.ndarray, "2 kinds"] = np.zeros((2, len(Place)), dtype=np.int64)
        self.sequences: Int[np.ndarray, "turns 2"] = np.zeros((MOST_TURNS, 2), dtype=np.int64)

    def add(
        self,
        capture: Int[np.ndarray, "tokens layers topk"] | None,
        live: Int[np.ndarray, "tokens layers topk"] | None,
        trained: Bool[np.ndarray, " tokens"],
        lengths: Int[np.ndarray, " sequences"],
    ) -> None:
        """Count some concatenated sequences. `trained` is the mask of tokens that the model sampled."""
        ends = lengths.cumsum()
        starts = ends - lengths
        begins = trained & ~np.concatenate([[False], trained[:-1]])
        begins[starts] = trained[starts]
        turns = np.add.reduceat(begins.astype(np.int64), starts).clip(1, MOST_TURNS) - 1
        np.add.at(self.sequences[:, 0], turns, 1)
        if capture is None:
            return
        known = (capture != UNKNOWN).any((1, 2))
        np.add.at(self.sequences[:, 1], turns[np.add.reduceat(known.astype(np.int64), starts) > 0], 1)
        followed = np.concatenate([trained[1:], [False]])
        followed[ends - 1] = False
        # If any later token of the sequence has a row, the token was an input of some request.
        total = known.cumsum()
        fed_later = np.repeat(total[ends - 1], lengths) > total
        at_ends, elsewhere = np.flatnonzero(trained & ~followed & fed_later), np.flatnonzero(followed)
        if len(at_ends):
            for place, chosen in enumerate((at_ends, elsewhere[:: len(elsewhere) // _SAMPLED + 1])):
                self.places[place] += _counts(capture[chosen], None if live is None else live[chosen])

    def anomalies(self) -> list[RoutingAnomaly]:
        """Report if sequences with some number of turns lack routes, and report wrong routes at the ends of turns."""
        return [*self._paths(), *self._ends()]

    def _paths(self) -> list[RoutingAnomaly]:
        number, with_routes = self.sequences.T
        shares = with_routes / np.maximum(number, 1)
        few = [place for place in range(MOST_TURNS) if number[place] >= _LEAST_SEQUENCES and shares[place] < _FEW]
        many = (number >= _LEAST_SEQUENCES) & (shares >= _MANY)
        if not few or not many.any():
            return []
        lacking, of = int((number - with_routes)[few].sum()), int(number[few].sum())
        named = ", ".join(f"{place + 1}{' or more' if place + 1 == MOST_TURNS else ''}" for place in few)
        text = (
            f"{lacking} of {counted(of, 'sequence')} of {named} turns have no routes, and of the others"
            f" {with_routes[many].sum() / number[many].sum():.0%} have theirs: a path of the rollout returns none, and"
            " replay is off there"
        )
        return [RoutingAnomaly("path", text)]

    def _ends(self) -> list[RoutingAnomaly]:
        (ends, others) = self.places.astype(np.float64)
        number = int(ends[Place.TOKENS])
        if number < _LEAST_ENDS:
            return []
        for kind, what in (
            (Place.FILLER, "carries filler routes (the first experts, or expert 0 alone, in every layer)"),
            (Place.MISSING, "lacks its routes"),
        ):
            here, there = (of[kind] / max(of[Place.TOKENS], 1) for of in (ends, others))
            if here >= _FEW and here - there >= _FEW:
                text = (
                    f"the last token of {int(ends[kind])} of {number} turns {what}, as do {there:.1%} of the other"
                    " tokens: only the request of the next turn returns its routes"
                )
                return [RoutingAnomaly("turn_end", text)]
        rows = int(ends[Place.ROWS])
        if rows < _LEAST_ROWS or not others[Place.ROWS]:
            return []
        here, there = (of[Place.SAME] / of[Place.ROWS] for of in (ends, others))
        if there < _BELONG or there - here < max(_FEW, float(least_lead(np.array(number)))):
            return []
        text = (
            f"the last tokens of turns do not carry their own routes: routers would choose them in {here:.3f} of the"
            f" rows, at other tokens in {there:.3f}"
        )
        return [RoutingAnomaly("turn_end", text)]


def _counts(
    rows: Int[np.ndarray, "tokens layers topk"], live: Int[np.ndarray, "tokens layers topk"] | None
) -> Int[np.ndarray, " kinds"]:
    found = np.zeros(len(Place), dtype=np.int64)
    missing = (rows == UNKNOWN).all((1, 2))
    is_filler = _is_filler(rows)
    if live is not None:
        is_filler &= ~_is_filler(live)
        both = ((rows != UNKNOWN) & (live != UNKNOWN)).all(-1)
        found[Place.ROWS] = both.sum()
        found[Place.SAME] = (both & (np.sort(rows, -1) == np.sort(live, -1)).all(-1)).sum()
    found[Place.TOKENS], found[Place.FILLER], found[Place.MISSING] = len(rows), is_filler.sum(), missing.sum()
    return found


def _is_filler(rows: Int[np.ndarray, "tokens layers topk"]) -> Bool[np.ndarray, " tokens"]:
    first = np.arange(rows.shape[-1], dtype=rows.dtype)
    found: Bool[np.ndarray, " tokens"] = (np.sort(rows, -1) == first).all((1, 2)) | (rows == 0).all((1, 2))
    return found
