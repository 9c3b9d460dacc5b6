# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Positions that the indexers of sparse attention (DeepSeek-V3.2) chose, in the captures of any framework."""

import numpy as np

from nemo_rl_moe.routing.agreement.indexer_rows import Indexed, indexer_anomalies, overlap_of
from nemo_rl_moe.routing.agreement.route_identity import RoutingAnomaly
from nemo_rl_moe.runs.folder.captured_sequences import UNKNOWN, CapturedRows
from nemo_rl_moe.shapes import Int


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
        rows, overlap = self.counts[Indexed.ROWS], overlap_of(self.counts)
        if not rows:
            return {}
        found = {"rows": float(rows), "rows_missing_share": float(self.counts[Indexed.MISSING] / rows)}
        return found if overlap is None else found | {"overlap": overlap}

    def anomalies(self) -> list[RoutingAnomaly]:
        """Report wrong positions of the indexers."""
        return indexer_anomalies(self.counts)
