# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Positions that the indexer of sparse attention (DeepSeek-V3.2) chose, captured for replay like routes.

A token attends to `k` positions up to its own. In a packed batch, an engine or trainer may count positions from the
start of the batch instead of the sequence. Then all positions are too high by the start of the sequence.
"""

from enum import IntEnum

import numpy as np

from nemo_rl_moe.routing.agreement.route_identity import RoutingAnomaly
from nemo_rl_moe.runs.folder.captured_sequences import UNKNOWN, CapturedRows
from nemo_rl_moe.shapes import Int

_LEAST_OVERLAP = 0.8
"""Least share of positions that rollout and training have in common. Correct positions differ only in ties."""


class Indexed(IntEnum):
    """Kinds of counts. A row has the positions that the indexer of one layer chose for one token."""

    ROWS = 0
    AHEAD = 1
    """The row names a position after its token."""
    SHIFTED = 2
    """The row names a position after its token, and none if the sequence's lowest position (above 0) is subtracted."""
    REPEATED = 3
    NEGATIVE = 4
    """The row names a negative position other than -1."""
    MISSING = 5
    SHORT = 6
    """The row names fewer positions than the token can attend to, although the row has slots for more."""
    COMPARED = 7
    """Number of positions in rows that rollout and training have. `COMMON` is the number that both chose."""
    COMMON = 8


class IndexerCounts:
    def __init__(self) -> None:
        self.counts: Int[np.ndarray, " kinds"] = np.zeros(len(Indexed), dtype=np.int64)

    def add(self, rows: CapturedRows) -> None:
        rollout = rows.columns.get("rollout_indexer")
        if rollout is None:
            return
        training = rows.columns.get("training_indexer")
        ends = rows.lengths.cumsum()
        for first, end in zip((ends - rows.lengths).tolist(), ends.tolist(), strict=True):
            chosen = slice(first, end - 1)
            self._add(rollout[chosen], None if training is None else training[chosen])

    def _add(
        self,
        rollout: Int[np.ndarray, "tokens layers k"],
        training: Int[np.ndarray, "tokens layers k"] | None,
    ) -> None:
        known = rollout != UNKNOWN
        has_any = known.any(-1)
        place = np.arange(len(rollout))[:, None]
        highest = rollout.max(-1, initial=UNKNOWN)
        ahead = has_any & (highest > place)
        start = int(rollout[known].min()) if known.any() else 0
        ordered = np.sort(rollout, -1)
        repeated = ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] != UNKNOWN)).any(-1)
        wanted = np.minimum(place + 1, rollout.shape[-1])
        of_kinds = {
            Indexed.ROWS: np.ones_like(has_any),
            Indexed.AHEAD: ahead,
            Indexed.SHIFTED: ahead & (start > 0) & (highest - start <= place),
            Indexed.REPEATED: repeated,
            Indexed.NEGATIVE: (rollout < UNKNOWN).any(-1),
            Indexed.MISSING: ~has_any,
            Indexed.SHORT: has_any & (known.sum(-1) < wanted),
        }
        for kind, mask in of_kinds.items():
            self.counts[kind] += int(mask.sum())
        if training is not None:
            both = has_any & (training != UNKNOWN).any(-1)
            self.counts[Indexed.COMPARED] += int(known[both].sum())
            for one, other in zip(rollout[both], training[both], strict=True):
                self.counts[Indexed.COMMON] += len(np.intersect1d(one[one != UNKNOWN], other[other != UNKNOWN]))

    def metrics(self) -> dict[str, float]:
        """Return the number of rows, the share of missing rows, and the share of positions common to rollout and
        training. Empty without rows.
        """
        rows, compared = self.counts[Indexed.ROWS], self.counts[Indexed.COMPARED]
        if not rows:
            return {}
        found = {"rows": float(rows), "rows_missing_share": float(self.counts[Indexed.MISSING] / rows)}
        return found | ({"overlap": float(self.counts[Indexed.COMMON] / compared)} if compared else {})

    def anomalies(self) -> list[RoutingAnomaly]:
        """Report wrong positions of the indexers."""
        counts = self.counts
        rows = int(counts[Indexed.ROWS])
        found = []
        if ahead := int(counts[Indexed.AHEAD]):
            shifted = int(counts[Indexed.SHIFTED])
            more = (
                f"; {shifted:,} are right if their sequence's start is subtracted: they count from the batch's start"
                if shifted > ahead // 2
                else ""
            )
            found.append(f"{ahead:,} of {rows:,} rows of the indexer name positions after their token{more}")
        for kind, what in (
            (Indexed.REPEATED, "name a position twice"),
            (Indexed.NEGATIVE, "name positions below 0"),
            (Indexed.SHORT, "name fewer positions than their token can attend to"),
        ):
            if counts[kind]:
                found.append(f"{int(counts[kind]):,} of {rows:,} rows of the indexer {what}")
        overlap = self.metrics().get("overlap")
        if overlap is not None and overlap < _LEAST_OVERLAP:
            found.append(f"the indexers of rollout and training have {overlap:.3f} of the positions in common")
        return [RoutingAnomaly("indexer", text) for text in found]
