# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Counts of captured positions that indexers of sparse attention (DeepSeek-V3.2) chose, and what is wrong with them.

A token attends to `k` positions up to its own. In a packed batch, an engine or trainer may count positions from the
start of the batch instead of the sequence. Then all positions are too high by the start of the sequence.
"""

from enum import IntEnum

import numpy as np

from nemo_rl_moe.routing.agreement.route_identity import RoutingAnomaly
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
    TAKEN = 9
    """Number of compared positions that training used."""
    USABLE = 10
    """The row is replayed."""


def overlap_of(counts: Int[np.ndarray, " kinds"]) -> float | None:
    """Return the share of the rollout's positions that training chose too, or None if none was compared."""
    return float(counts[Indexed.COMMON] / counts[Indexed.COMPARED]) if counts[Indexed.COMPARED] else None


def indexer_anomalies(counts: Int[np.ndarray, " kinds"], *, same_weights: bool = True) -> list[RoutingAnomaly]:
    """Report wrong positions of the indexers.

    Args:
        same_weights: Whether rollout and training have the same weights. Otherwise they may choose other positions.
    """
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
    overlap = overlap_of(counts)
    if same_weights and overlap is not None and overlap < _LEAST_OVERLAP:
        found.append(f"the indexers of rollout and training have {overlap:.3f} of the positions in common")
    return [RoutingAnomaly("indexer", text) for text in found]
