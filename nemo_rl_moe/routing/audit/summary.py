# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Results of an audit as text and as JSON."""

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any

import numpy as np

from nemo_rl_moe.errors import counted
from nemo_rl_moe.routing.audit.audited_run import AuditedRun, findings_over_steps
from nemo_rl_moe.routing.audit.versions import PREFIX, version_note

SHOWN = (
    ("rollout routes", (
        ("rows a step", "moe/routing/rows_expected"),
        ("usable", "moe/routing/rows_usable_share"),
        ("missing", "moe/routing/rows_missing_share"),
    )),
    ("training against rollout", (
        ("rows that agree", "moe/routing/live_agreement"),
        ("tokens that differ anywhere", "moe/routing/tokens_differing_share"),
        ("single experts that agree", "moe/routing/slot_agreement"),
        ("the same beyond chance", "moe/routing/slot_kappa"),
    )),
    ("rows of the same beginnings at an earlier step", (
        ("changed by training", "moe/engine/trainer_moved_share"),
        ("changed by the engine", "moe/engine/engine_moved_share"),
    )),
    ("tokens of older weights, in responses of several", (
        ("rows that agree", "moe/routing/versions/agreement"),
        ("those of their own version would", "moe/routing/versions/agreement_of_own"),
        ("those of the newest version would", "moe/routing/versions/agreement_of_newest"),
    )),
    ("log-probs that are not equal, of an exact run", (
        ("number", "moe/engine/unequal_logprobs"),
        ("share", "moe/engine/unequal_logprobs_share"),
    )),
    ("noise floor of the trainer", (
        ("rows that differ", "moe/routing_noise/rows_differing_trainer"),
        ("log-prob gap, mean of its size", "moe/routing_noise/mean_abs_trainer"),
    )),
    ("log-prob gap of training and rollout", (
        ("mean of its size", "moe/routing_split/mean_abs_total"),
        ("  of this routing", "moe/routing_split/mean_abs_routing"),
        ("  of this numerics", "moe/routing_split/mean_abs_numerics"),
        ("divergence (k3)", "moe/routing_split/kl_total"),
        ("  of this routing", "moe/routing_split/kl_routing"),
        ("share of routing in its variance", "moe/routing_split/variance_share_routing"),
    )),
    ("load of the experts in training", (
        ("cv", "moe/cv_mean"),
        ("cv beyond chance", "moe/cv_excess_mean"),
        ("share of dead experts", "moe/dead_expert_frac_mean"),
    )),
    ("load of the experts in the rollout", (
        ("cv", "rollout_moe/cv_mean"),
        ("cv beyond chance", "rollout_moe/cv_excess_mean"),
        ("share of dead experts", "rollout_moe/dead_expert_frac_mean"),
    )),
)  # fmt: skip
"""Parts of the printed table: title, and the label and key of each metric in it."""
JSON_LAYOUT: Mapping[str, Any] = {"format": "routing-audit", "version": 1}
"""Format and version of the JSON output. Keys keep name and meaning within a version. New keys may be added."""
_OF_FINDINGS = ("kind", "layer", "first_step", "last_step", "is_over", "text")


def lines_of(run: AuditedRun) -> list[str]:
    """Return the results as text: metrics at the first and last step, then missing columns and notes."""
    lines = heading_of(run)
    lines += table_lines(
        ("first step", "last", "lowest", "highest"),
        lambda key: (values[0], values[-1], min(values), max(values)) if (values := run.series(key)) else (),
    )
    if run.missing:
        lines += ["columns that are missing, and what they would show:", *(f"  {text}" for text in run.missing)]
    lines += [f"note: {text}" for text in dict.fromkeys([*run.notices, *_of_versions(run)])]
    lines += [f"NOT CHECKED: {text}" for text in run.not_checked.values()]
    found = counted(len(problems_of(run)), "finding", zero="no")
    lines.append(f"{found} in what was checked" if run.not_checked else found)
    return lines


def _of_versions(run: AuditedRun) -> list[str]:
    """Return a note on the responses whose tokens come from several weight versions. Empty if no step has any."""
    names = ("rows", "agreement", "agreement_of_own", "agreement_of_newest")
    series = np.array([run.series(f"{PREFIX}{name}") for name in names])
    if not series.size:
        return []
    rows, *shares = series
    return [version_note(float(rows.sum()), *((share * rows).sum() / rows.sum() for share in shares))]


def table_lines(headings: Sequence[str], numbers_of: Callable[[str], Sequence[float]]) -> list[str]:
    """Return a table of the metrics in `SHOWN` for which `numbers_of` returns numbers."""
    lines = [" " * 40 + "".join(f"{heading:>12}" for heading in headings)]
    for title, rows in SHOWN:
        shown = [(label, numbers) for label, key in rows if (numbers := numbers_of(key))]
        lines += [title] if shown else []
        lines += [f"  {label:38}" + "".join(f"{number_text(n):>12}" for n in numbers) for label, numbers in shown]
    return lines


def problems_of(run: AuditedRun) -> list[str]:
    """Return a line for each finding."""
    return _of_steps(run) + [found.text for found in findings_over_steps(run)]


def _of_steps(run: AuditedRun) -> list[str]:
    """Return lines about anomalies of steps. An anomaly of the same kind and layer at several steps gets one line."""
    found: dict[tuple[str, int | None], list[tuple[int, str]]] = {}
    for step in run.steps:
        for anomaly in step.anomalies:
            found.setdefault((anomaly.kind, anomaly.layer), []).append((step.step, anomaly.text))
    lines = []
    for of_cause in found.values():
        first, last = of_cause[0][0], of_cause[-1][0]
        if first == last:  # a step may have several anomalies of a kind, such as several sequences
            lines += [f"step {first}: {text}" for _, text in of_cause]
        else:
            number = len({step for step, _ in of_cause})
            lines.append(f"steps {first} to {last} ({number} of them), at first: {of_cause[0][1]}")
    return lines


def heading_of(run: AuditedRun) -> list[str]:
    """Return two lines about the audited files and model."""
    description = run.description
    made_by = f", {description.made_by}" if description.made_by else ""
    sequences, tokens = (
        sum(counts) for counts in zip(*((s.num_sequences, s.num_tokens) for s in run.steps), strict=True)
    )
    return [
        f"{run.path}: {counted(len(run.steps), 'step')}, {counted(sequences, 'sequence')},"
        f" {counted(tokens, 'token')}{made_by}",
        f"{counted(len(description.layers), 'MoE layer')}, {counted(description.num_experts, 'expert')},"
        f" {description.topk} a token",
    ]


def number_text(value: float) -> str:
    """Format a number with few characters."""
    return f"{value:,.0f}" if isfinite(value) and abs(value) >= 1000 and value == int(value) else f"{value:.4g}"


def as_json(run: AuditedRun) -> Mapping[str, Any]:
    """Return a run as JSON, in the layout of docs/audit.md."""
    description = run.description
    return {
        **JSON_LAYOUT,
        "capture": str(run.path),
        "problems": problems_of(run),
        "not_checked": dict(run.not_checked),
        "layers": list(description.layers),
        "num_experts": description.num_experts,
        "topk": description.topk,
        "notices": list(dict.fromkeys([*run.notices, *_of_versions(run)])),
        "findings": [
            {"side": found.side, **{name: getattr(found.finding, name) for name in _OF_FINDINGS}}
            for found in findings_over_steps(run)
        ],
        "steps": [
            {
                "step": step.step,
                "num_sequences": step.num_sequences,
                "num_tokens": step.num_tokens,
                "columns": sorted(step.columns),
                "metrics": {key: value for key, value in step.metrics.items() if isfinite(value)},
                "findings": [anomaly.text for anomaly in step.anomalies],
            }
            for step in run.steps
        ],
    }
