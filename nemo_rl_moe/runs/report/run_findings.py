# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Findings of a run, from its files and the thresholds in its configuration."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from nemo_rl_moe.config.files import find_config, read_with_defaults
from nemo_rl_moe.errors import DataError, counted
from nemo_rl_moe.routing.findings import engine_signal, learning_signal, routing_signal, staleness_signal
from nemo_rl_moe.routing.findings.reward_signal import is_reward_metric
from nemo_rl_moe.routing.findings.routing_signal import ANOMALIES_METRIC, MISSING_METRIC
from nemo_rl_moe.routing.findings.tracker import ROUTER_LOSS_METRICS, Finding, FindingTracker, Thresholds
from nemo_rl_moe.runs.folder.failures import FailuresTail
from nemo_rl_moe.runs.folder.metrics import METRICS_FILE_NAME, read_history
from nemo_rl_moe.runs.folder.run_data import RunData, describe_run, number_at, series_of

_BASE_CONFIGURATION = "sft.yaml"
_METRICS = (
    "train/moe/avg_overload_factor",
    "train/skipped_updates",
    MISSING_METRIC,
    *ROUTER_LOSS_METRICS,
    *learning_signal.METRICS,
    *routing_signal.METRICS,
    *staleness_signal.METRICS,
    *engine_signal.METRICS,
)
_REWARD = "train/reward"
_OF_REWARDS = ("constant_reward", "no_advantages")
_FORCED_ROUTING = "moe_router_force_"


@dataclass(frozen=True)
class Episodes:
    """All findings of one kind in one layer, or in the entire model."""

    latest: Finding
    number: int
    first_step: int


def thresholds_of(config: Mapping[str, Any]) -> Thresholds:
    """Return the thresholds in `logger.alerts` of a resolved configuration. Keys that an old run lacks get defaults."""
    alerts = {**_alerts(read_with_defaults(find_config(_BASE_CONFIGURATION))), **_alerts(config)}
    return Thresholds(**{field.name: alerts[field.name] for field in fields(Thresholds)})


def findings_of(run: RunData, thresholds: Thresholds | None = None) -> list[Finding]:
    """Return the findings of a run so far, in the order of their first steps."""
    tracker = FindingTracker(thresholds or thresholds_of(run.config), run.topk, run.rank_names)
    metrics: dict[int, dict[str, float]] = {}
    for key in (*_METRICS, *filter(is_reward_metric, run.metrics)):
        if series := run.metrics.get(key):
            for step, value in zip(series.steps.tolist(), series.values.tolist(), strict=True):
                metrics.setdefault(step, {})[key] = value
    load = run.expert_load
    counts, layers = ({}, []) if load is None else (load.by_step(), load.layers.tolist())
    for step in sorted(metrics.keys() | counts.keys() | run.failures.keys()):
        tracker.observe(step, metrics.get(step, {}), layers, counts.get(step), run.failures.get(step, ()))
    with_capture = run.metrics.get(ANOMALIES_METRIC)
    for step in sorted(run.anomalies.keys() | set(() if with_capture is None else with_capture.steps.tolist())):
        tracker.observe_anomalies(step, run.anomalies.get(step, ()))
    return _forced_routing(run) + tracker.findings


def scoring_lines(run_folder: Path) -> list[str]:
    """Return lines for the end of a run: its reward, responses without a score, and rewards that teach nothing."""
    try:
        failures, history = FailuresTail(run_folder).read().records, read_history(run_folder / METRICS_FILE_NAME)
    except (OSError, DataError):
        return []
    lines = []
    if points := history.get(_REWARD):
        (first, before), (last, after) = points[0], points[-1]
        lines.append(
            f"  reward of step {first}: {before:.4f}"
            if first == last
            else f"  reward of steps {first} and {last}: {before:.4f} -> {after:.4f}"
        )
    for split, of in (("train", "responses"), ("val", "responses of validations")):
        failed = [record for record in failures if record.content.split == split]
        if failed:
            number, all_of = (
                sum(getattr(record.content, name) for record in failed) for name in ("number", "responses")
            )
            lines.append(
                f"  warning: {number} {of} could not be scored, {number / all_of:.0%} of all in"
                f" {counted(len(failed), 'step')}; the first at step {failed[0].step}: {failed[0].content.first}"
            )
    rewards = {key: series_of(points) for key, points in history.items() if key in _METRICS or is_reward_metric(key)}
    found = findings_of(replace(describe_run(run_folder), metrics=rewards))
    return lines + [f"  warning: {each.text}" for each in found if each.kind in _OF_REWARDS and not each.is_over]


def episodes_of(findings: Sequence[Finding]) -> list[Episodes]:
    """Group findings by kind and layer. Current findings come first, and the entire model comes before layers."""
    of_key: dict[tuple[str, int | None], list[Finding]] = {}
    for finding in findings:
        of_key.setdefault(finding.key, []).append(finding)
    episodes = [Episodes(found[-1], len(found), found[0].first_step) for found in of_key.values()]
    return sorted(episodes, key=lambda found: (found.latest.is_over, found.latest.layer is not None))


def _forced_routing(run: RunData) -> list[Finding]:
    """Return the finding about forced routing in a drill, if any. It does not depend on metrics."""
    in_force = {
        name: value
        for name, value in run.moe_configuration.items()
        if name.startswith(_FORCED_ROUTING) and value is not None and value is not False
    }
    if not in_force:
        return []
    which = ", ".join(f"{name} is {value}" for name, value in sorted(in_force.items()))
    text = f"forced routing: {which}; the router's own choices are overruled, and the trained model is worthless"
    return [Finding("forced_routing", None, min(1, run.last_step), run.last_step, False, text)]


def _alerts(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return key -> limit (None or a number) in `logger.alerts`. Other values, as in an edited file, are omitted."""
    logger = config.get("logger")
    alerts = logger.get("alerts") if isinstance(logger, Mapping) else None
    found = alerts if isinstance(alerts, Mapping) else {}
    return {name: value for name, value in found.items() if value is None or number_at(alerts, name) is not None}
