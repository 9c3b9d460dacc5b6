# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""An audited run, and its split into two runs, rollout and training, for the report and its findings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import numpy as np

from nemo_rl_moe.routing.agreement.statistics import slot_chance
from nemo_rl_moe.routing.audit.auditor import AuditedStep, names_of_slots
from nemo_rl_moe.routing.findings.learning_signal import IdleKind
from nemo_rl_moe.routing.findings.routing_signal import WRONG_ROUTES
from nemo_rl_moe.routing.findings.tracker import Finding
from nemo_rl_moe.runs.folder.captured_sequences import CaptureDescription
from nemo_rl_moe.runs.folder.expert_load import ExpertLoadHistory
from nemo_rl_moe.runs.folder.routing import RoutingHistory
from nemo_rl_moe.runs.folder.run_data import RunData, Series
from nemo_rl_moe.runs.report.run_findings import episodes_of, findings_of

ROLLOUT, TRAINING = "rollout", "training"
_OF_CAPTURE, _OF_ROLLOUT_LOAD = ("moe/routing/", "moe/engine/", "moe/expert_bias_"), "rollout_moe/"
_TAKEN = "moe/routing/agreement"
"""Key of a metric that is not shown, since no file has the experts that training took by replay."""

_WANTED = {
    "rollout_experts": "anything about the rollout's routes; the engine must return routed experts",
    "training_experts": "whether training chose the rollout's experts; record the routers in the training forward",
    "rollout_logprobs": "the mismatch; the engine must return the log-probabilities of sampled tokens",
    "training_logprobs": "the mismatch; record the log-probabilities before the update",
    "replayed_logprobs": "how much of the mismatch is routing; one more forward pass with the rollout's experts",
    "repeated_experts": "the noise floor; one more forward pass with another composition of the batches",
    "loss_mask": "which tokens are trained on: all count",
}


_COMPARISONS = {
    "training": (
        "moe/routing/live_agreement",
        "whether the routes are those of these tokens and layers: there is no training side (--training)",
    ),
    "logprobs": (
        "moe/routing_split/mean_abs_total",
        "how far log-probabilities of rollout and training are apart: one of them is missing",
    ),
}
"""Comparison for `--require` -> metric that shows that it was made, and the message if no step has this metric."""


@dataclass(frozen=True)
class AuditedRun:
    path: Path
    description: CaptureDescription
    steps: Sequence[AuditedStep]
    notices: Sequence[str] = field(default_factory=list)
    writers: Sequence[str] = ()

    @property
    def columns(self) -> frozenset[str]:
        return frozenset.intersection(*(step.columns for step in self.steps))

    @property
    def missing(self) -> list[str]:
        """One line per missing column: its name, what it would show, and how to get it."""
        # A noise floor needs only some of the sequences.
        has_noise = any(key.startswith("moe/routing_noise/") for step in self.steps for key in step.metrics)
        reported = self.columns | ({"repeated_experts"} if has_noise else frozenset())
        return [f"{name}: {what}" for name, what in _WANTED.items() if name not in reported]

    @property
    def not_checked(self) -> dict[str, str]:
        """Name of each comparison that could not be made -> the question that stays open."""
        return {name: text for name, (metric, text) in _COMPARISONS.items() if not self.series(metric)}

    def series(self, key: str) -> list[float]:
        """Return the values of a metric at the steps that have it."""
        return [step.metrics[key] for step in self.steps if key in step.metrics]


@dataclass(frozen=True)
class SideFinding:
    side: str
    finding: Finding

    @property
    def text(self) -> str:
        over = f"; over after step {self.finding.last_step}" if self.finding.is_over else ""
        return f"{self.side}: {self.finding.text}{over}"


def findings_over_steps(run: AuditedRun) -> list[SideFinding]:
    """Return the findings that need several steps, as a live run reports them.

    Wrong routes of a single step are excluded, because they are reported as anomalies.
    """
    skipped = {*WRONG_ROUTES.values(), *get_args(IdleKind)}  # findings of single steps, and of rewards
    return [
        SideFinding(side.label or "", episode.latest)
        for side in sides_of(run)
        for episode in episodes_of(findings_of(side))
        if episode.latest.kind not in skipped
    ]


def sides_of(run: AuditedRun, name: str = "") -> list[RunData]:
    """Return the data of rollout and training in the form of two runs, for reports. A side without data is omitted.

    The rollout has its expert load and everything about its routes: missing and malformed ones, agreement with
    training, wrong routes. Training has its expert load, the log-probability mismatch and the noise floor.
    """
    keys = {key for step in run.steps for key in step.metrics}
    rollout: dict[str, Series] = {}
    training: dict[str, Series] = {}
    for key in sorted(keys - {_TAKEN}):
        if key.startswith(_OF_ROLLOUT_LOAD):
            rollout[f"train/moe/{key.removeprefix(_OF_ROLLOUT_LOAD)}"] = _series(run, key)
        else:
            (rollout if key.startswith(_OF_CAPTURE) else training)[f"train/{key}"] = _series(run, key)
    reports = {step.step: step.report for step in run.steps if step.report is not None}
    notes = [*dict.fromkeys(run.notices), *(f"not reported: {text}" for text in run.missing)]
    found: list[RunData] = []
    for side, metrics in ((ROLLOUT, rollout), (TRAINING, training)):
        loads = {step.step: load for step in run.steps if (load := step.load(side == ROLLOUT)) is not None}
        if not metrics and not loads:
            continue
        is_rollout = side == ROLLOUT
        found.append(
            RunData(
                run.path,
                metrics,
                _load_history(run.description, loads),
                config=_settings(run),
                moe_configuration={"moe_router_topk": run.description.topk},
                notes=notes if not found else [],
                routing=_routing_history(run) if is_rollout and reports else None,
                anomalies={step: list(report.anomalies) for step, report in reports.items()} if is_rollout else {},
                label=f"{name}: {side}" if name else side,
                rank_names=names_of_slots(run.writers),
            )
        )
    return found


def _series(run: AuditedRun, key: str) -> Series:
    points = [(step.step, step.metrics[key]) for step in run.steps if key in step.metrics]
    steps, values = zip(*points, strict=True)
    return Series(np.array(steps, dtype=np.int64), np.array(values, dtype=np.float64))


def _load_history(description: CaptureDescription, loads: Mapping[int, np.ndarray]) -> ExpertLoadHistory | None:
    if not loads:
        return None
    layers = np.array(description.layers, dtype=np.int64)
    return ExpertLoadHistory(np.array(list(loads), dtype=np.int64), layers, np.stack(list(loads.values())))


def _routing_history(run: AuditedRun) -> RoutingHistory:
    steps = [step for step in run.steps if step.report is not None]
    totals = [step.report.totals for step in steps if step.report is not None]
    num_layers = len(run.description.layers)
    unknown = np.full((num_layers, num_layers), np.nan)
    return RoutingHistory(
        np.array([step.step for step in steps], dtype=np.int64),
        np.array(run.description.layers, dtype=np.int64),
        np.stack([of_step.rows.numpy() for of_step in totals]),
        np.stack([of_step.captured_experts.sum(1).numpy() for of_step in totals]),
        np.stack([slot_chance(of_step).numpy() for of_step in totals]),
        np.stack([of_step.margins.numpy() for of_step in totals]),
        np.stack([unknown if step.layer_overlap is None else step.layer_overlap for step in steps]),
    )


def _settings(run: AuditedRun) -> dict[str, Any]:
    description = run.description
    return {
        "made_by": description.made_by,
        "layers": list(description.layers),
        "num_experts": description.num_experts,
        "topk": description.topk,
        "columns": sorted(run.columns),
        "sequences": sum(step.num_sequences for step in run.steps),
        "tokens": sum(step.num_tokens for step in run.steps),
    }
