# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Findings of a run's whole history, by the thresholds in the run's own configuration."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from nemo_rl_moe.config.files import find_config, read_with_defaults
from nemo_rl_moe.moe import learning_signal, routing_signal
from nemo_rl_moe.moe.findings import Finding, FindingTracker, Thresholds
from nemo_rl_moe.moe.tape_findings import ANOMALIES_METRIC, MISSING_METRIC
from nemo_rl_moe.run_folder.run_data import RunData, number_at

_BASE_CONFIGURATION = "sft.yaml"
_METRICS = (
    "train/moe/avg_overload_factor",
    "train/skipped_updates",
    MISSING_METRIC,
    *learning_signal.METRICS,
    *routing_signal.METRICS,
)
_FORCED_ROUTING = "moe_router_force_"


@dataclass(frozen=True)
class Episodes:
    """Findings of one kind in one layer, or in the whole model.

    Attributes:
        latest: The one that began last.
        number: Number of findings.
        first_step: First step of the first one.
    """

    latest: Finding
    number: int
    first_step: int


def thresholds_of(config: Mapping[str, Any]) -> Thresholds:
    """Thresholds in `logger.alerts` of a resolved configuration; keys that an older run lacks have shipped values."""
    shipped = read_with_defaults(find_config(_BASE_CONFIGURATION))
    alerts = {**_alerts(shipped), **_alerts(config)}
    return Thresholds(**{field.name: alerts[field.name] for field in fields(Thresholds)})


def findings_of(run: RunData, thresholds: Thresholds | None = None) -> list[Finding]:
    """Findings of a run so far, in the order in which they began.

    Args:
        run: The run.
        thresholds: None: those of its own configuration.
    """
    tracker = FindingTracker(thresholds or thresholds_of(run.config), run.topk, run.rank_names)
    metrics: dict[int, dict[str, float]] = {}
    for key in _METRICS:
        if series := run.metrics.get(key):
            for step, value in zip(series.steps.tolist(), series.values.tolist(), strict=True):
                metrics.setdefault(step, {})[key] = value
    load = run.expert_load
    row_of = {} if load is None else {step: row for row, step in enumerate(load.steps.tolist())}
    layers = [] if load is None else load.layers.tolist()
    for step in sorted(metrics.keys() | row_of.keys()):
        counts = load.counts[row_of[step]] if load is not None and step in row_of else None
        tracker.observe(step, metrics.get(step, {}), layers, counts)
    with_tape = run.metrics.get(ANOMALIES_METRIC)
    for step in sorted(run.anomalies.keys() | set(() if with_tape is None else with_tape.steps.tolist())):
        tracker.observe_tape(step, run.anomalies.get(step, ()))
    return _forced_routing(run) + tracker.findings


def episodes_of(findings: Sequence[Finding]) -> list[Episodes]:
    """Findings by kind and layer: those that go on first, and of these those of the whole model."""
    of_key: dict[tuple[str, int | None], list[Finding]] = {}
    for finding in findings:
        of_key.setdefault(finding.key, []).append(finding)
    episodes = [Episodes(found[-1], len(found), found[0].first_step) for found in of_key.values()]
    return sorted(episodes, key=lambda found: (found.latest.is_over, found.latest.layer is not None))


def _forced_routing(run: RunData) -> list[Finding]:
    """Finding for a drill with forced routing, whatever its numbers are."""
    settings = {name: value for name, value in run.moe_configuration.items() if name.startswith(_FORCED_ROUTING)}
    in_force = {name: value for name, value in settings.items() if value is not None and value is not False}
    if not in_force:
        return []
    which = ", ".join(f"{name} is {value}" for name, value in sorted(in_force.items()))
    text = f"forced routing: {which}; the router's own choices are overruled, and what the run trains is worthless"
    return [Finding("forced_routing", None, min(1, run.last_step), run.last_step, False, text)]


def _alerts(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Limits of a file that may have been edited: null or a number each."""
    logger = config.get("logger")
    alerts = logger.get("alerts") if isinstance(logger, Mapping) else None
    found = alerts if isinstance(alerts, Mapping) else {}
    return {name: value for name, value in found.items() if value is None or number_at(alerts, name) is not None}
