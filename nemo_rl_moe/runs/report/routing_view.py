# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Data of a report about routing in GRPO: disagreement by layer and margin, statistics, experts by advantage."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from nemo_rl_moe.routing.agreement.row_kinds import MARGIN_EDGES, Row
from nemo_rl_moe.runs.folder.advantages import AdvantageHistory
from nemo_rl_moe.runs.folder.routing import RoutingHistory
from nemo_rl_moe.runs.folder.run_data import Series
from nemo_rl_moe.runs.folder.saved_samples import evenly_spaced
from nemo_rl_moe.runs.report.arrays import ArrayPool, highest_of_stretches, narrowest

_MOST_COLUMNS, _MOST_FRAMES, _FEWEST = 300, 200, 10
_MOST_SCORES = 100_000
"""Largest number of scores over all shown steps. Thus large models have fewer steps."""
_STATISTICS = {
    Row.USABLE: "usable",
    Row.MISSING: "missing",
    Row.ZERO: "expert 0 alone",
    Row.DUPLICATED: "an expert twice",
    Row.OUT_OF_RANGE: "experts that do not exist",
    Row.UNEXPECTED: "of padding or last tokens",
}
_WRONG = tuple(kind for kind in _STATISTICS if kind != Row.USABLE)
_FAMILIES = {
    "router_gradient": "Gradient of the routers, layer by layer",
    "routing_noise": "Noise floor, layer by layer",
    "routing_drift": "Drift of the routing, layer by layer",
    "routing_split": "Parts of the mismatch, layer by layer",
    "routing_advantage": "Experts and advantages, layer by layer",
    "routing_writers": "Experts by who wrote the token, layer by layer: divergence in bits",
}
_OF_A_LAYER = re.compile(r"train/moe/(\w+)/(\w+)_layer_(\d{1,6})")


def routing_view(routing: RoutingHistory, pool: ArrayPool, detail: float = 1.0) -> dict[str, Any]:
    """Return the data of the cards about routing. A row is the captured experts of one token in one layer.

    - `layers`
    - `by_layer`: share of rows for which the routers would choose other experts, `[stretches, layers]`, as the highest
      value in each stretch of consecutive steps. NaN without usable rows.
    - `margins`: number of rows by class of router margin (all rows, differing rows), `[classes, 2]`, at single steps
      and over all steps
    - `statistics`: number of rows by kind over all steps, and for each layer with wrong rows
    - `identity`: overlap of each layer's routes with each layer's routers, `[layers, layers]`, at the step at which
      some layer's routes are most like another layer's. None if unknown.
    """
    usable = routing.rows[..., Row.USABLE]
    with np.errstate(invalid="ignore", divide="ignore"):
        differing = 1 - routing.rows[..., Row.LIVE_SAME] / usable
    last, highest = highest_of_stretches(
        np.where(usable > 0, differing, -np.inf), max(int(_MOST_COLUMNS * detail), _FEWEST)
    )
    frames = evenly_spaced(len(routing.steps), max(int(_MOST_FRAMES * detail), _FEWEST))
    return {
        "layers": routing.layers.tolist(),
        "by_layer": {
            "steps": pool.add(routing.steps[last].astype(np.int32)),
            "steps_of_a_column": -(-len(routing.steps) // len(last)),
            "differing": pool.add(np.where(np.isfinite(highest), highest, np.nan).astype(np.float32)),
        },
        "margins": {
            "classes": [*(f"≤ {edge:g}" for edge in MARGIN_EDGES), f"> {MARGIN_EDGES[-1]:g}"],
            "steps": pool.add(routing.steps[frames].astype(np.int32)),
            "of_steps": pool.add(narrowest(routing.margins[frames].sum(1))),
            "of_all": routing.margins.sum((0, 1)).tolist(),
        },
        "statistics": _statistics(routing),
        "identity": _identity(routing, pool),
    }


def advantage_view(advantages: AdvantageHistory, pool: ArrayPool, detail: float = 1.0) -> dict[str, Any] | None:
    """Return the data of the card about experts by advantage. None if no group had responses of different advantages.

    `of_steps` has the scores at single `steps`. `of_all` has combined scores: the sum over the steps divided by the
    square root of their number. It is again a score if steps are independent (Stouffer's method). NaN without a score.
    """
    known = ~np.isnan(advantages.scores)
    if not known.any():
        return None
    with np.errstate(invalid="ignore", divide="ignore"):
        together = np.where(known, advantages.scores, 0).sum(0, dtype=np.float64) / np.sqrt(known.sum(0))
    num_frames = min(_MOST_FRAMES, _MOST_SCORES // advantages.scores[0].size)
    frames = evenly_spaced(len(advantages.steps), max(int(num_frames * detail), 1))
    return {
        "layers": advantages.layers.tolist(),
        "num_experts": int(advantages.scores.shape[2]),
        "num_steps": len(advantages.steps),
        "steps": pool.add(advantages.steps[frames].astype(np.int32)),
        "of_steps": pool.add(advantages.scores[frames].astype(np.float32)),
        "of_all": pool.add(together.astype(np.float32)),
    }


def _identity(routing: RoutingHistory, pool: ArrayPool) -> dict[str, Any] | None:
    overlap = routing.layer_overlap
    if overlap is None or np.isnan(overlap).all():
        return None
    own = np.diagonal(overlap, axis1=1, axis2=2)
    others = np.where(np.eye(overlap.shape[1], dtype=bool), -np.inf, np.nan_to_num(overlap, nan=-np.inf))
    leads = np.where(np.isnan(own), -np.inf, others.max(2) - own)
    worst = int(leads.max(1).argmax())
    return {"step": int(routing.steps[worst]), "overlap": pool.add(overlap[worst].astype(np.float32))}


def layer_tables(metrics: Mapping[str, Series]) -> list[dict[str, Any]]:
    """Return tables of the metrics of single layers at their last step: `title`, `step`, `columns`, `rows`."""
    families: dict[str, dict[str, dict[int, Series]]] = {}
    for key, series in metrics.items():
        match = _OF_A_LAYER.fullmatch(key)
        if match and match[1] in _FAMILIES:
            families.setdefault(match[1], {}).setdefault(match[2], {})[int(match[3])] = series
    tables = []
    for family, columns in families.items():
        step = max(int(series.steps[-1]) for of_column in columns.values() for series in of_column.values())
        layers = sorted({layer for of_column in columns.values() for layer in of_column})
        names = sorted(columns, reverse=family == "router_gradient")  # norms before cosines
        rows = [[layer, *(_value_at(columns[name].get(layer), step) for name in names)] for layer in layers]
        tables.append({"title": _FAMILIES[family], "step": step, "columns": names, "rows": rows})
    return tables


def _value_at(series: Series | None, step: int) -> str | None:
    return None if series is None or series.steps[-1] != step else f"{series.values[-1]:.4g}"


def _statistics(routing: RoutingHistory) -> dict[str, Any]:
    expected = routing.rows[..., Row.EXPECTED].sum(1)
    kinds = []
    for kind, label in _STATISTICS.items():
        of_steps = routing.rows[..., kind].sum(1)
        shares = of_steps / np.maximum(expected, 1)
        is_wrong = kind != Row.USABLE
        # The step with the most wrong rows, or with the fewest usable rows.
        worst = int(shares.argmax() if is_wrong else shares.argmin())
        affected = np.flatnonzero(of_steps if is_wrong else of_steps < expected)
        kinds.append(
            {
                "label": label,
                "is_wrong": is_wrong,
                "rows": int(of_steps.sum()),
                "share": float(of_steps.sum() / max(int(expected.sum()), 1)),
                "num_steps": len(affected),
                "first_step": int(routing.steps[affected[0]]) if len(affected) else None,
                "worst_step": int(routing.steps[worst]) if len(affected) else None,
                "worst_share": float(shares[worst]) if len(affected) else None,
            }
        )
    by_layer = routing.rows.sum(0)
    found = [kind for kind in _WRONG if by_layer[:, kind].any()]
    wrong_layers = np.flatnonzero(by_layer[:, found].any(1)).tolist()
    return {
        "num_steps": len(routing.steps),
        "expected": int(expected.sum()),
        "kinds": kinds,
        "columns": [_STATISTICS[kind] for kind in found],
        "layers": [
            [int(routing.layers[row]), int(by_layer[row, Row.EXPECTED]), *by_layer[row, found].tolist()]
            for row in wrong_layers
        ],
    }
