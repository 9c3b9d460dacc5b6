# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Limits on the disagreement between captured routes and routers, which hold for any run from its first step.

Rounding and a few updates change a router's choice only at near ties. So captured routes and router agree far beyond
chance, and if they differ for a token, its last chosen expert scores close to the first one not chosen. Both hold in
every number format.
"""

from collections.abc import Sequence

import numpy as np

from nemo_rl_moe.routing.agreement.route_identity import LEAST_KAPPA, RoutingAnomaly, foreign_capture, least_lead
from nemo_rl_moe.routing.agreement.row_kinds import Row
from nemo_rl_moe.routing.agreement.statistics import AgreementTotals, agreement_metrics, slot_chance
from nemo_rl_moe.shapes import Bool

_CLEAR_SHARE, _LEAST_CLEAR_ROWS = 0.25, 200
"""Clear rows are the rows with the widest margins between chosen and unchosen experts: at least this share of a layer's
rows outside the narrowest class of margins, and at least this number of rows.
"""
_LEAST_DIFFERING, _OF_ALL_ROWS = 0.05, 0.75
"""Near ties do not explain the differences if the share of clear rows that differ is at least the first number, and at
least this fraction (the second number) of the share of all rows that differ.
"""
_TIES_ALONE = 0.5
"""Near ties explain the differences if, outside the narrowest class of margins, the share of differing rows is at most
this fraction of the share of differing rows over all classes.
"""


def unexplained_disagreement(totals: AgreementTotals, layers: Sequence[int]) -> list[RoutingAnomaly]:
    """Report the layers whose captured routes agree with the routers by little more than chance, as one anomaly.

    The agreement of such a layer is below the middle between chance and 1, by more than 0.1 and by more than six
    standard errors.
    """
    kappa = agreement_metrics(totals, tuple(layers), per_layer=False).get("routing/slot_kappa")
    if found := foreign_capture(kappa):
        return found
    rows, slots = totals.rows.numpy(), totals.captured_experts.sum(1).numpy()
    chance, usable = slot_chance(totals).numpy(), rows[:, Row.USABLE]
    with np.errstate(invalid="ignore", divide="ignore"):
        agreement = rows[:, Row.LIVE_SLOTS] / slots
        is_low = chance + LEAST_KAPPA * (1 - chance) - agreement > least_lead(usable)
    is_compared = totals.live_experts.numpy().any(1)
    low = np.flatnonzero(is_low & is_compared & (rows[:, Row.LIVE_SAME] < usable) & ~_ties_alone(totals))
    if not len(low):
        return []
    numbers = ", ".join(str(layers[place]) for place in low.tolist())
    text = (
        f"the routes of layer{'s' if len(low) > 1 else ''} {numbers} are not those of these tokens: they agree with"
        f" the routers in {agreement[low].mean():.3f} of the experts, and would in {chance[low].mean():.3f} by chance"
    )
    return [RoutingAnomaly("unrelated", text, int(layers[low[0]]) if len(low) == 1 else None)]


def _ties_alone(totals: AgreementTotals) -> Bool[np.ndarray, " layers"]:
    """Return True for layers whose differing rows mostly have the narrowest margins, so near ties explain them."""
    margins = totals.margins.numpy()
    usable, differing = margins.sum(1).T
    of_others, differing_of_others = margins[:, 1:].sum(1).T
    return (usable > 0) & (differing_of_others * usable <= _TIES_ALONE * differing * of_others)


def clear_differences(totals: AgreementTotals, layers: Sequence[int]) -> dict[str, float]:
    """Return metrics of the layer whose clear rows differ most. Empty if near ties explain the differences.

    Clear rows have the widest margins between chosen and unchosen experts. A layer counts if the share of its clear
    rows that differ is at least 5%, and at least three quarters of the share of all its rows that differ. Then neither
    rounding nor a few updates is the cause.
    """
    margins = totals.margins.numpy()
    found: dict[str, float] = {}
    for layer, (usable, differing) in zip(layers, margins.transpose(0, 2, 1), strict=True):
        least = max(_LEAST_CLEAR_ROWS, _CLEAR_SHARE * usable[1:].sum())
        above = usable[::-1].cumsum()[::-1]
        classes = np.flatnonzero(above[1:] >= least) + 1
        if not len(classes):
            continue
        first = classes[-1]
        share, of_all = differing[first:].sum() / above[first], differing.sum() / usable.sum()
        if share >= max(_LEAST_DIFFERING, _OF_ALL_ROWS * of_all, found.get("routing/clear_rows_differing_share", 0)):
            found = {
                "routing/clear_rows_differing_share": float(share),
                "routing/clear_rows_differing_layer": float(layer),
            }
    return found
