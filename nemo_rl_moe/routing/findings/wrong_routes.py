# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Findings of a step's captured routed experts: routes that cannot be right, by kind and layer."""

from collections.abc import Iterator, Sequence
from typing import Literal

from nemo_rl_moe.routing.agreement.route_identity import AnomalyKind, RoutingAnomaly

WrongRoutesKind = Literal[
    "malformed_routes",
    "routes_of_another_layer",
    "permuted_expert_ids",
    "routes_of_another_token",
    "routes_of_another_sequence",
    "unrelated_routes",
    "repeated_routes",
    "routes_lost_in_one_rank",
]
WRONG_ROUTES: dict[AnomalyKind, WrongRoutesKind] = {
    "rows": "malformed_routes",
    "layer": "routes_of_another_layer",
    "ids": "permuted_expert_ids",
    "token": "routes_of_another_token",
    "sequence": "routes_of_another_sequence",
    "unrelated": "unrelated_routes",
    "repeated": "repeated_routes",
    "rank": "routes_lost_in_one_rank",
}
ANOMALIES_METRIC = "train/moe/routing/anomalies"
"""Key of the number of anomalies: every step with a capture has it."""
MISSING_METRIC = "train/moe/routing/rows_missing_share"
_MOST_TEXTS = 2


def wrong_routes(anomalies: Sequence[RoutingAnomaly]) -> Iterator[tuple[WrongRoutesKind, int | None, str]]:
    """Yield kind, layer (None: several or all) and description of each kind and layer that has an anomaly."""
    found: dict[tuple[WrongRoutesKind, int | None], list[str]] = {}
    for anomaly in anomalies:
        found.setdefault((WRONG_ROUTES[anomaly.kind], anomaly.layer), []).append(anomaly.text)
    for (kind, layer), texts in found.items():
        more = [f"and {len(texts) - _MOST_TEXTS} more like it"] if len(texts) > _MOST_TEXTS else []
        yield kind, layer, "; ".join(texts[:_MOST_TEXTS] + more)
