# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Alerts during a run about routing, failing reward functions and idle steps.

A problem that lasts for several steps is an episode, and has one alert.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from jaxtyping import Int

from nemo_rl_moe.config.schema_run import AlertsConfig
from nemo_rl_moe.errors import DataError
from nemo_rl_moe.routing.agreement.route_identity import RoutingAnomaly
from nemo_rl_moe.routing.findings.reward_signal import FailedResponses
from nemo_rl_moe.routing.findings.routing_signal import ANOMALIES_METRIC
from nemo_rl_moe.routing.findings.tracker import QUIET_STEPS, Finding, FindingTracker, Thresholds, likewise
from nemo_rl_moe.runs.folder.expert_load import read_expert_load
from nemo_rl_moe.runs.folder.failures import FailuresTail
from nemo_rl_moe.runs.folder.line_tail import by_step
from nemo_rl_moe.runs.folder.metrics import METRICS_FILE_NAME, read_metrics
from nemo_rl_moe.runs.folder.routing import AnomaliesTail

_MOST_LINES = 20


@dataclass(frozen=True)
class Alert:
    line: str
    title: str
    text: str


class AlertWatch:
    def __init__(self, settings: AlertsConfig, topk: int | None):
        thresholds = Thresholds(**{field.name: getattr(settings, field.name) for field in fields(Thresholds)})
        self._tracker = FindingTracker(thresholds, topk)
        longest_streak = max(
            settings.dead_expert_steps or 0,
            settings.sustained_steps,
            settings.idle_steps or 0,
            settings.missing_routes_steps,
            settings.sudden_steps or 0,
        )
        # The next step may continue an episode whose last step was `QUIET_STEPS` ago. To find that episode, the streak
        # before it is also needed.
        self._num_steps_to_replay = QUIET_STEPS + longest_streak
        self._load: tuple[int, Sequence[int], Int[np.ndarray, "layers experts"]] | None = None

    def observe(
        self,
        step: int,
        metrics: Mapping[str, float],
        layers: Sequence[int] = (),
        counts: Int[np.ndarray, "layers experts"] | None = None,
        failed: Sequence[FailedResponses] = (),
    ) -> list[Alert]:
        """Return the alerts that begin with this step. If there are no training metrics, only failures are checked.

        `layers` and `counts` default to the arguments of `observe_load` for this step.
        """
        if not failed and not any(key.startswith("train/") for key in metrics):
            return []
        if counts is None and self._load is not None and self._load[0] == step:
            _, layers, counts = self._load
        return alerts_of(step, self._tracker.observe(step, metrics, layers, counts, failed))

    def observe_load(self, step: int, layers: Sequence[int], counts: Int[np.ndarray, "layers experts"]) -> None:
        """Set the expert load of a step, for the call of `observe` that follows."""
        self._load = step, layers, counts

    def observe_anomalies(self, step: int, anomalies: Sequence[RoutingAnomaly]) -> list[Alert]:
        """Return the alerts about a step's captured routes. Call it before `observe`, as anomalies may end the run."""
        return alerts_of(step, self._tracker.observe_anomalies(step, anomalies))

    def replay(self, run_folder: Path, last_step: int) -> None:
        """Observe the last steps before a resume. There are no alerts, since the user has already seen them.

        Steps in damaged files are skipped. An episode that continues may then be reported again.
        """
        first_step = last_step - self._num_steps_to_replay + 1
        loads: dict[int, Int[np.ndarray, "layers experts"]] = {}
        layers: list[int] = []
        with suppress(OSError, DataError):
            history = read_expert_load(run_folder, first_step)
            loads, layers = history.by_step(), history.layers.tolist()
        anomalies: dict[int, list[RoutingAnomaly]] = {}
        with suppress(DataError):
            anomalies = by_step(AnomaliesTail(run_folder).read().records)
        failures: dict[int, list[FailedResponses]] = {}
        with suppress(DataError):
            failures = by_step(FailuresTail(run_folder).read().records)
        with suppress(OSError, DataError):
            for record in read_metrics(run_folder / METRICS_FILE_NAME):
                if first_step <= record.step <= last_step:
                    failed = failures.get(record.step, ())
                    self.observe(record.step, record.metrics, layers, loads.get(record.step), failed)
                    if ANOMALIES_METRIC in record.metrics:
                        self.observe_anomalies(record.step, anomalies.get(record.step, ()))


def alerts_of(step: int, begun: Iterable[Finding]) -> list[Alert]:
    """Return one alert for each kind of finding that begins at a step. An alert covers all layers."""
    by_kind = itertools.groupby(sorted(begun, key=lambda finding: finding.kind), key=lambda finding: finding.kind)
    return [_alert(step, kind.replace("_", " "), list(findings)) for kind, findings in by_kind]


def _alert(step: int, kind: str, findings: Sequence[Finding]) -> Alert:
    first, *others = findings
    line = f"step {step}: {first.text}{likewise(others)}"
    lines = [finding.text for finding in findings[:_MOST_LINES]]
    if len(findings) > _MOST_LINES:
        lines.append(f"and {len(findings) - _MOST_LINES} more layers")
    return Alert(line, f"{kind} at step {step}", "\n".join(lines))
