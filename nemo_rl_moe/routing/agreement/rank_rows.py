# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Counts per data-parallel rank, to find a rank that gets no routes, or routes of another rank.

In sums over all ranks, wrong routes of one rank do not show (AReno#524), so each rank adds its counts to one of 64
slots. In a larger job several ranks share a slot.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from nemo_rl_moe.routing.agreement.route_identity import RoutingAnomaly
from nemo_rl_moe.routing.agreement.statistics import Row
from nemo_rl_moe.shapes import Int

SLOTS = 64
_LEAST_MISSING, _OTHERS_AT_MOST = 0.05, 0.25
"""Least share of missing rows in a reported rank, and the other ranks' highest share as a fraction of it."""
_LEAST_LEAD, _SIGMAS = 0.2, 6.0


@dataclass(frozen=True)
class RankShare:
    slot: int
    share: float
    of_others: float


def rows_by_rank(rows: Int[Tensor, "layers kinds"], data_parallel_rank: int) -> Int[Tensor, "slots kinds"]:
    """Return the sums over a rank's layers in the rank's slot, and 0 elsewhere, to be added up over all ranks."""
    slots = rows.new_zeros(SLOTS, rows.shape[1])
    slots[data_parallel_rank % SLOTS] = rows.sum(0)
    return slots


def missing_in_one_rank(by_slot: Int[Tensor, "slots kinds"]) -> RankShare | None:
    """Return the rank that lacks at least 5% of its rows, and at least four times the share that other ranks lack."""
    rows = by_slot.numpy()
    found = _furthest(rows[:, Row.MISSING], rows[:, Row.EXPECTED])
    if found is None or found.share < _LEAST_MISSING or found.of_others > _OTHERS_AT_MOST * found.share:
        return None
    return found


def rank_anomalies(
    by_slot: Int[Tensor, "slots kinds"], num_layers: int, name_of: Callable[[int], str]
) -> list[RoutingAnomaly]:
    """Report the rank whose capture disagrees with its routers while the other ranks' captures agree.

    Its agreement is lower by at least 0.2 and by at least six standard errors. In the standard error, a token counts
    once, and not once per layer.
    """
    rows = by_slot.numpy()
    usable = rows[:, Row.USABLE]
    found = _furthest(usable - rows[:, Row.LIVE_SAME], usable)
    if found is None:
        return []
    tokens = int(usable[found.slot]) / max(num_layers, 1)
    if found.share - found.of_others < max(_LEAST_LEAD, _SIGMAS * 0.5 / max(tokens, 1.0) ** 0.5):
        return []
    text = (
        f"{name_of(found.slot)} has routes that are not its tokens': its routers would choose them in"
        f" {1 - found.share:.3f} of the rows, the other ranks' routers theirs in {1 - found.of_others:.3f}"
    )
    return [RoutingAnomaly("rank", text)]


def rank_name(slot: int, num_ranks: int) -> str:
    """Return the name of the data-parallel rank that uses a slot. If several ranks share the slot, name all of them."""
    if num_ranks <= SLOTS:
        return f"data-parallel rank {slot}"
    return f"one of the data-parallel ranks {', '.join(map(str, range(slot, num_ranks, SLOTS)))}"


def _furthest(part: Int[np.ndarray, " slots"], whole: Int[np.ndarray, " slots"]) -> RankShare | None:
    """Return the slot with the highest share `part / whole`. None unless at least two slots have rows."""
    has_rows = np.flatnonzero(whole)
    if len(has_rows) < 2:
        return None
    parts, wholes = part[has_rows], whole[has_rows]
    shares = parts / wholes
    furthest = int(shares.argmax())
    others = (parts.sum() - parts[furthest]) / (wholes.sum() - wholes[furthest])
    return RankShare(int(has_rows[furthest]), float(shares[furthest]), float(others))
