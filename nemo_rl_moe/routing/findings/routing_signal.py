# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Signs in a step's metrics that rollout and training route by different rules, or that balancing has stopped. With
such failures, rows are still well-formed and the loss is still finite."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from nemo_rl_moe.routing.agreement.route_identity import AnomalyKind, RoutingAnomaly
from nemo_rl_moe.routing.findings.level_shift import RunningLevel
from nemo_rl_moe.routing.findings.streaks import Streaks

RoutingKind = Literal["low_agreement", "float32_flips", "clear_choices_differ", "missing_rows", "frozen_expert_bias"]
LIVE_AGREEMENT = "train/moe/routing/live_agreement"
FLOAT32_FLIPS = "train/moe/routing/float32_flips_share"
MISSING_SHARE = "train/moe/routing/rows_missing_in_one_rank"
MISSING_RANK = "train/moe/routing/rank_with_missing_rows"
FROZEN_LAYERS = "train/moe/expert_bias_frozen_layers"
CLEAR_DIFFERING = "train/moe/routing/clear_rows_differing_share"
CLEAR_LAYER = "train/moe/routing/clear_rows_differing_layer"
METRICS = (LIVE_AGREEMENT, FLOAT32_FLIPS, CLEAR_DIFFERING, CLEAR_LAYER, MISSING_SHARE, MISSING_RANK, FROZEN_LAYERS)
"""Keys that `RoutingSignal` reads."""
LEAST_DROP = 0.02
"""Least drop of the routers' agreement with the rollout that is reported. In healthy runs, a step changes less."""
MOST_FLOAT32_FLIPS = 2e-4
"""Largest share of rows that may differ between two float32 passes with the same weights. It is below 1e-4 in healthy
runs, and about 1e-3 with a router that computes in bfloat16."""


class RoutingSignal:
    """Detects routing that cannot be right, from the metrics of successive steps. Steps are added in order."""

    def __init__(self, num_steps: int | None, rank_names: Sequence[str] = ()):
        self._num_steps, self._rank_names = num_steps, rank_names
        self._agreement = RunningLevel(LEAST_DROP)
        self._streaks: Streaks[RoutingKind] = Streaks()

    def observe(self, step: int, metrics: Mapping[str, float]) -> Iterator[tuple[RoutingKind, int, str]]:
        """Add a step. Yield (condition, its first step, description) for each condition that has held long enough."""
        if self._num_steps is None:
            return
        texts = self._conditions(metrics)
        for kind, first, length in self._streaks.extend(step, texts):
            if length >= self._num_steps:
                yield kind, first, texts[kind].format(first)

    def _conditions(self, metrics: Mapping[str, float]) -> dict[RoutingKind, str]:
        """Return condition -> description for the conditions that hold at a step, with `{}` for their first step."""
        found: dict[RoutingKind, str] = {}
        agreement = metrics.get(LIVE_AGREEMENT)
        if agreement is not None:
            usual = self._agreement.median
            if self._agreement.leaves(agreement, upwards=False):
                found["low_agreement"] = (
                    f"routers would choose the rollout's experts in {agreement:.3f} of the rows since step {{}},"
                    f" and in {usual:.3f} before: weights, routes or number formats of rollout and training differ"
                )
        flips = metrics.get(FLOAT32_FLIPS, 0.0)
        if flips > MOST_FLOAT32_FLIPS:
            found["float32_flips"] = (
                f"rollout and training choose other experts in {flips:.2%} of the rows since step {{}}, though both"
                " have the same weights in float32, where near ties alone differ: one of them computes in another"
                " number format (such as its router), or the routes do not belong to these tokens"
            )
        if CLEAR_DIFFERING in metrics:
            found["clear_choices_differ"] = (
                f"routers of layer {metrics.get(CLEAR_LAYER, -1):.0f} would choose other experts than the rollout in"
                f" {metrics[CLEAR_DIFFERING]:.1%} of their clearest choices since step {{}}, where rounding and a few"
                " updates change near ties alone: weights or routes of rollout and training differ"
            )
        if MISSING_SHARE in metrics:
            rank = int(metrics.get(MISSING_RANK, -1))
            name = self._rank_names[rank] if self._rank_names else f"data-parallel rank {rank}"
            found["missing_rows"] = (
                f"{name} has lacked {metrics[MISSING_SHARE]:.0%} of the rollout's routes since"
                " step {}, and other ranks nearly none: routes are lost on the way to it"
            )
        frozen = metrics.get(FROZEN_LAYERS, 0.0)
        if frozen > 0:
            found["frozen_expert_bias"] = (
                f"the expert bias of {frozen:.0f} layers has not moved since step {{}}, though"
                " moe_router_bias_update_rate is above 0: nothing evens out their loads"
            )
        return found


WrongRoutesKind = Literal[
    "malformed_routes",
    "routes_of_another_layer",
    "permuted_expert_ids",
    "routes_of_another_token",
    "routes_of_another_sequence",
    "unrelated_routes",
    "repeated_routes",
    "routes_lost_in_one_rank",
    "routes_lost_in_a_path",
    "filler_routes",
    "unequal_logprobs",
    "wrong_indexer_positions",
    "impossible_logprobs",
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
    "path": "routes_lost_in_a_path",
    "turn_end": "filler_routes",
    "exact": "unequal_logprobs",
    "indexer": "wrong_indexer_positions",
    "logprobs": "impossible_logprobs",
}
ANOMALIES_METRIC = "train/moe/routing/anomalies"
"""Key of the number of anomalies, which every step with a capture has."""
MISSING_METRIC = "train/moe/routing/rows_missing_share"
_MOST_TEXTS = 2


def wrong_routes(anomalies: Sequence[RoutingAnomaly]) -> Iterator[tuple[WrongRoutesKind, int | None, str]]:
    """Yield (kind of finding, layer, description), once for all anomalies of a kind and layer. None: several layers."""
    found: dict[tuple[WrongRoutesKind, int | None], list[str]] = {}
    for anomaly in anomalies:
        found.setdefault((WRONG_ROUTES[anomaly.kind], anomaly.layer), []).append(anomaly.text)
    for (kind, layer), texts in found.items():
        more = [f"and {len(texts) - _MOST_TEXTS} more like it"] if len(texts) > _MOST_TEXTS else []
        yield kind, layer, "; ".join(texts[:_MOST_TEXTS] + more)
