# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Silent failures of routing, planted into capture folders, and found by `nemo-rl-moe audit`."""

import json
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
from planted_faults import FAULTS, RENUMBERED, Site

from nemo_rl_moe.cli import main as run_command
from nemo_rl_moe.runs.folder.capture_folder import CaptureFolderWriter, read_description, read_step, steps_of
from nemo_rl_moe.runs.folder.captured_sequences import UNKNOWN, CaptureDescription, CapturedSequence

NUM_WRITERS = 2
OF_RUNS = (
    *("router_bf16", "hot_rank", "frozen_bias", "stale_experts", "lost_bucket", "skipped_expert"),
    *("permuted_ids_bf16", "exchanged_ids_bf16"),
)
"""Faults that change what a model computes, and not what is written of it, or that strike a run in another number
format: a run with the fault writes the capture."""
Step = list[CapturedSequence]


@dataclass(frozen=True)
class FileScore:
    """Findings of the audit of a capture with a fault.

    Attributes:
        steps: Steps until it was reported, the first faulty one included; None: it was not.
        reported: The first line that reported it.
        false_alarms: Lines about the steps before.
    """

    steps: int | None
    reported: str
    false_alarms: tuple[str, ...]


def read_capture(folder: Path) -> tuple[CaptureDescription, dict[int, Step]]:
    """Return all sequences of a capture, by step."""
    description = read_description(folder)
    found: dict[int, Step] = {}
    for step, files in steps_of(folder).items():
        found[step] = []
        for rows in read_step(description, step, files):
            ends = rows.lengths.cumsum()
            for name, first, end in zip(rows.names, (ends - rows.lengths).tolist(), ends.tolist(), strict=True):
                columns = {key: values[first:end].copy() for key, values in rows.columns.items()}
                found[step].append(CapturedSequence(name, end - first, columns))
    return description, found


def plant(capture: Path, fault: str, onset: int, folder: Path) -> None:
    """Write a capture with a fault, as two ranks would.

    Args:
        fault: Its name in `FAULTS` or `RENUMBERED`, none of `OF_RUNS`.
        onset: First step that it strikes, counted from 1, whatever numbers the steps have.
    """
    description, steps = read_capture(capture)
    sites = [Site(None, rank, onset) for rank in range(NUM_WRITERS)]
    writers = [CaptureFolderWriter(folder, description, f"rank-{rank}") for rank in range(NUM_WRITERS)]
    for place, (step, sequences) in enumerate(steps.items(), start=1):
        for rank, (site, writer) in enumerate(zip(sites, writers, strict=True)):
            site.step, of_rank = place, sequences[rank::NUM_WRITERS]
            given = [sequence.columns["rollout_experts"][:-1].copy() for sequence in of_rank]
            faulty = _with_fault(fault, site, of_rank) if site.strikes else of_rank
            site.kept = given
            writer.write(step, faulty)


def _with_fault(fault: str, site: Site, sequences: Step) -> Step:
    spoil = (FAULTS | RENUMBERED)[fault].spoil
    if spoil is not None:
        routes = [sequence.columns["rollout_experts"][:-1].copy() for sequence in sequences]
        given = spoil(site, routes)
        return [
            _with(sequence, rollout_experts=rows[: sequence.num_tokens])
            for sequence, rows in zip(sequences, given, strict=True)
        ]
    if fault == "dropped_rank":
        lost = [np.full_like(sequence.columns["rollout_experts"], UNKNOWN) for sequence in sequences]
        return (
            sequences
            if site.rank == 0
            else [_with(sequence, rollout_experts=rows) for sequence, rows in zip(sequences, lost, strict=True)]
        )
    assert fault == "dead_expert", fault
    names = [name for name in ("rollout_experts", "training_experts") if name in sequences[0].columns]
    return [
        _with(sequence, **{name: _without_expert(sequence.columns[name]) for name in names}) for sequence in sequences
    ]


def _without_expert(routes: np.ndarray) -> np.ndarray:
    """Return the experts of tokens that would get the third of layer 1: the next one that they do not have."""
    routes = routes.copy()
    for row in routes[:, 1]:
        if 3 in row:
            row[row == 3] = next(expert for expert in range(4, 4 + len(row) + 1) if expert not in row)
    return routes


def _with(sequence: CapturedSequence, **columns: np.ndarray) -> CapturedSequence:
    return replace(sequence, columns={**sequence.columns, **columns})


def score_of_files(capture: Path, fault: str, onset: int, folder: Path) -> FileScore:
    """Return the findings of the audit of a capture into which a fault is planted."""
    plant(capture, fault, onset, folder)
    return score_of_capture(folder, onset)


def score_of_capture(folder: Path, onset: int) -> FileScore:
    """Return the findings of the audit of a capture with a fault: of the steps before it, then of one faulty step more
    each time.

    Args:
        onset: First faulty step, counted from 1.
    """
    steps = list(steps_of(folder))
    early = audited(folder, steps[onset - 2]) if onset > 1 else []
    for number, step in enumerate(steps[onset - 1 :], start=1):
        reported = audited(folder, step)
        if reported:
            return FileScore(number, reported[0], tuple(early))
    return FileScore(None, "", tuple(early))


def audited(folder: Path, last_step: int | None = None) -> Sequence[str]:
    """Return the findings of `nemo-rl-moe audit` in the steps up to one."""
    run = audit(folder, last_step)
    of_steps = [text for step in run["steps"] for text in step["findings"]]
    return of_steps + [finding["text"] for finding in run["findings"]]


def lowest_agreement(folder: Path) -> float:
    """Return the share of rows in which training chose the rollout's experts, of the step where it is lowest."""
    return min(step["metrics"]["moe/routing/live_agreement"] for step in audit(folder)["steps"])


def audit(folder: Path, last_step: int | None = None) -> dict[str, Any]:
    """Return what `nemo-rl-moe audit --json` says of a capture, up to a step."""
    output = StringIO()
    until = [] if last_step is None else ["--steps", f":{last_step}"]
    with redirect_stdout(output), redirect_stderr(StringIO()):
        run_command(["audit", str(folder), *until, "--json", "-"])
    (run,) = json.loads(output.getvalue())
    return dict(run)
