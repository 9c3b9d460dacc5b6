# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Comparison of two runs, such as runs with different engines, before and after a fix, or of different days.

Metrics are means over the steps, and loads are sums over the steps. Sequences with the same token ids are compared
token by token with `audit_step`: one run takes the role of the rollout, the other that of training.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from typing import Any

import numpy as np

from nemo_rl_moe.errors import counted
from nemo_rl_moe.routing.audit.audited_run import ROLLOUT, TRAINING, AuditedRun
from nemo_rl_moe.routing.audit.auditor import AuditedStep, audit_step
from nemo_rl_moe.routing.audit.partners import token_key
from nemo_rl_moe.routing.audit.sources import Source
from nemo_rl_moe.routing.audit.summary import number_text, table_lines
from nemo_rl_moe.routing.metrics.load_arrays import load_distance
from nemo_rl_moe.runs.folder.captured_sequences import (
    UNKNOWN,
    CaptureDescription,
    CapturedRows,
    CapturedSequence,
    rows_of,
    sequences_of,
)

_MOST_TOKENS = 65536
"""Number of tokens of the other run's sequences, per step, that are kept in memory."""
_OF_SAME = (
    ("rows that agree", "moe/routing/live_agreement"),
    ("single experts that agree", "moe/routing/slot_agreement"),
    ("the same beyond chance", "moe/routing/slot_kappa"),
    ("log-prob gap, mean of its size", "moe/routing_split/mean_abs_total"),
    ("divergence (k3)", "moe/routing_split/kl_total"),
)


@dataclass(frozen=True)
class LoadDistance:
    mean: float
    highest: float
    layer: int


@dataclass(frozen=True)
class Comparison:
    run: AuditedRun
    other: AuditedRun
    means: Mapping[str, tuple[float, float]]
    distances: Mapping[str, LoadDistance]
    same: Mapping[str, Sequence[AuditedStep]]
    note: str = ""

    @property
    def problems(self) -> list[str]:
        """A line for each anomaly between the runs, in sequences that both have. Anomalies of one run are excluded."""
        return [
            f"against {self.other.path}: step {step.step}: {side}: {anomaly.text}"
            for side, steps in self.same.items()
            for step in steps
            for anomaly in step.anomalies
            if anomaly.kind != "logprobs"
        ]


def compared(run: AuditedRun, source: Source, other: AuditedRun, other_source: Source) -> Comparison:
    keys = sorted({key for step in run.steps for key in step.metrics})
    means = {key: (_mean(run.series(key)), _mean(there)) for key in keys if (there := other.series(key))}
    mine, theirs = run.description, other.description
    if (mine.layers, mine.num_experts, mine.topk) != (theirs.layers, theirs.num_experts, theirs.topk):
        return Comparison(run, other, means, {}, {}, "the models differ: loads and sequences cannot be compared")
    distances = {side: found for side in (ROLLOUT, TRAINING) if (found := _distance(run, other, side)) is not None}
    same: dict[str, list[AuditedStep]] = {ROLLOUT: [], TRAINING: []}
    for step, other_step in _pairs(source, other_source):
        for side, rows in _same_sequences(mine, step, source.read[step], other_source.read[other_step]).items():
            same[side].append(audit_step(mine, step, [rows]))
    known = {side: steps for side, steps in same.items() if steps}
    return Comparison(
        run, other, means, distances, known, "" if known else "no sequence has the same token ids in both"
    )


def comparison_lines(comparison: Comparison) -> list[str]:
    def numbers_of(key: str) -> tuple[float, ...]:
        here, there = comparison.means.get(key, (nan, nan))
        return (here, there, here - there) if key in comparison.means else ()

    lines = [f"against {comparison.other.path}, means over the steps"]
    return lines + table_lines(("here", "there", "change"), numbers_of) + distance_lines(comparison)


def distance_lines(comparison: Comparison) -> list[str]:
    """Return lines about the distances between both runs' expert loads, and about the sequences that both have."""
    lines = [
        f"distance of the loads beyond chance, {side}: {found.mean:.3g}, highest {found.highest:.3g} in layer"
        f" {found.layer}"
        for side, found in comparison.distances.items()
    ]
    for side, steps in comparison.same.items():
        sequences, tokens = (sum(getattr(step, name) for step in steps) for name in ("num_sequences", "num_tokens"))
        lines.append(f"{side} of {counted(sequences, 'sequence')} that both have, {counted(tokens, 'token')}:")
        means = _means_of_same(steps)
        lines += [f"  {label:38}{number_text(means[key]):>12}" for label, key in _OF_SAME if key in means]
    return lines + ([f"note: {comparison.note}"] if comparison.note else [])


def comparison_json(comparison: Comparison) -> Mapping[str, Any]:
    return {
        "capture": str(comparison.other.path),
        "means": {key: list(values) for key, values in comparison.means.items() if all(map(isfinite, values))},
        "load_distance": {
            side: {"mean": found.mean, "highest": found.highest, "layer": found.layer}
            for side, found in comparison.distances.items()
        },
        "same_sequences": {
            side: {
                "num_sequences": sum(step.num_sequences for step in steps),
                "num_tokens": sum(step.num_tokens for step in steps),
                "means": _means_of_same(steps),
            }
            for side, steps in comparison.same.items()
        },
        "findings": comparison.problems,
        "note": comparison.note,
    }


def _means_of_same(steps: Sequence[AuditedStep]) -> dict[str, float]:
    found = {key: [step.metrics.get(key, nan) for step in steps] for _, key in _OF_SAME}
    known = {key: [value for value in values if isfinite(value)] for key, values in found.items()}
    return {key: _mean(values) for key, values in known.items() if values}


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


def _distance(run: AuditedRun, other: AuditedRun, side: str) -> LoadDistance | None:
    both = []
    for one in (run, other):
        known = [load for step in one.steps if (load := step.load(side == ROLLOUT)) is not None]
        if not known:
            return None
        both.append(np.sum(known, axis=0))
    of_layers = load_distance(both[0], both[1], run.description.topk)
    worst = int(of_layers.argmax())
    return LoadDistance(float(of_layers.mean()), float(of_layers[worst]), run.description.layers[worst])


def _pairs(source: Source, other: Source) -> Iterator[tuple[int, int]]:
    """Yield (step, step of the other run) that may have common sequences: equal numbers, or the only step of each."""
    if len(source.read) == len(other.read) == 1:
        yield next(iter(source.read)), next(iter(other.read))
        return
    yield from ((step, step) for step in source.read if step in other.read)


def _same_sequences(
    description: CaptureDescription,
    step: int,
    read: Callable[[], Iterator[CapturedRows]],
    read_other: Callable[[], Iterator[CapturedRows]],
) -> dict[str, CapturedRows]:
    """Return side (rollout, training) -> sequences that both runs have.

    They have this side of the first run as rollout, and the same side of the other run as training, for `audit_step`.
    """
    theirs: dict[bytes, Mapping[str, np.ndarray]] = {}
    tokens = 0
    for _, columns in _sequences(read_other()):
        if tokens < _MOST_TOKENS and token_key(columns) not in theirs:
            theirs[token_key(columns)] = columns
            tokens += len(columns["token_ids"])
    found: dict[str, list[CapturedSequence]] = {ROLLOUT: [], TRAINING: []}
    for name, mine in _sequences(read()):
        other = theirs.get(token_key(mine))
        for side in found if other is not None else ():
            assert other is not None
            columns = _side_by_side(mine, other, side)
            if len(columns) > 1:
                found[side].append(CapturedSequence(name, len(mine["token_ids"]), columns))
    return {side: rows_of(description, step, sequences) for side, sequences in found.items() if sequences}


def _side_by_side(mine: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray], side: str) -> dict[str, np.ndarray]:
    everywhere = np.ones(len(mine["token_ids"]), dtype=bool)
    columns = {"loss_mask": mine.get("loss_mask", everywhere) & other.get("loss_mask", everywhere)}
    for kind in ("experts", "logprobs"):
        name = f"{side}_{kind}"
        if name in mine and name in other:
            columns |= {f"rollout_{kind}": mine[name].copy(), f"training_{kind}": other[name]}
    if "rollout_experts" in columns:
        columns["rollout_experts"][-1] = UNKNOWN  # a rollout has no routes of its last token
    return columns


def _sequences(parts: Iterator[CapturedRows]) -> Iterator[tuple[str, Mapping[str, np.ndarray]]]:
    for part in parts:
        if "token_ids" in part.columns:
            yield from ((sequence.name, sequence.columns) for sequence in sequences_of(part))
