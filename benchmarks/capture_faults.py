# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Silent failures of routing, planted into capture folders, for `nemo-rl-moe audit` to find."""

import json
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
from planted_faults import FAULTS, RENUMBERED, Site

from nemo_rl_moe.cli import main as run_command
from nemo_rl_moe.routing.audit.audited_run import AuditedRun
from nemo_rl_moe.routing.audit.auditor import audit_step
from nemo_rl_moe.routing.audit.history import RunHistory
from nemo_rl_moe.routing.audit.summary import problems_of
from nemo_rl_moe.runs.folder.capture_folder import CaptureFolderWriter, read_description, read_step, steps_of
from nemo_rl_moe.runs.folder.captured_sequences import UNKNOWN, CaptureDescription, CapturedSequence, rows_of

NUM_WRITERS = 2
OF_FILES = {
    "stale_prefixes": "routes of beginnings from older weights",
    "saw_tooth": "a log-prob gap that restarts reset",
    "turn_ends": "fillers at the ends of turns",
    "lost_path": "conversations without routes",
    "sampling_mask": "log-probs over a subset that keeps 0.9 to 1 of the probability",
}
"""Faults that are only planted into files, with their descriptions."""
STEPS_A_RUN = 100
_SAW_TEETH, _GROWTH = 7, 0.6
"""Steps between restarts, and growth of the gap per step."""
OF_RUNS = (
    *("router_bf16", "hot_rank", "frozen_bias", "stale_experts", "lost_bucket", "skipped_expert"),
    *("permuted_ids_bf16", "exchanged_ids_bf16"),
)
"""Faults that change the model's computation instead of the files, or need another number format. A run with the fault
writes the capture."""
Step = list[CapturedSequence]


@dataclass(frozen=True)
class FileScore:
    """Findings of the audit of a capture with a fault.

    Attributes:
        steps: Steps until the report, with the first faulty one. None if it was not reported.
        reported: The first line that reported it.
        false_alarms: Lines about earlier steps.
    """

    steps: int | None
    reported: str
    false_alarms: tuple[str, ...]


def read_capture(folder: Path) -> tuple[CaptureDescription, dict[int, Step]]:
    """Read all sequences of a capture, by step."""
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
        fault: Name in `FAULTS` or `RENUMBERED` that is not in `OF_RUNS`, or in `OF_FILES`.
        onset: First faulty step, counted from 1 independent of the steps' numbers.
    """
    description, steps = read_capture(capture)
    sites = [Site(None, rank, onset) for rank in range(NUM_WRITERS)]
    writers = [CaptureFolderWriter(folder, description, f"rank-{rank}") for rank in range(NUM_WRITERS)]
    known: Beginnings = {}
    for place, (step, sequences) in enumerate(steps.items(), start=1):
        for rank, (site, writer) in enumerate(zip(sites, writers, strict=True)):
            site.step, of_rank = place, [_in_turns(fault, sequence) for sequence in sequences[rank::NUM_WRITERS]]
            given = [sequence.columns["rollout_experts"][:-1].copy() for sequence in of_rank]
            if fault == "stale_prefixes":
                _remember(known, of_rank, site)
            faulty = _with_fault(fault, site, of_rank, known) if site.strikes else of_rank
            site.kept = given
            writer.write(step, faulty)


Beginnings = dict[tuple[int, bytes], np.ndarray]
"""Rows by rank and prefix (the tokens up to the row's)."""


def _remember(known: Beginnings, sequences: Step, site: Site) -> None:
    """Keep the first rows of each prefix of prompts from the step before the fault on, like a prefix cache."""
    for sequence in sequences:
        for key, row in _beginnings(sequence, site.rank):
            if not site.strikes:
                known[key] = row
            known.setdefault(key, row)


def _beginnings(sequence: CapturedSequence, rank: int) -> Iterator[tuple[tuple[int, bytes], np.ndarray]]:
    ids, prompt = sequence.columns["token_ids"], int(sequence.columns["loss_mask"].argmax())
    for place in range(prompt):
        yield (rank, ids[: place + 1].tobytes()), sequence.columns["rollout_experts"][place].copy()


def _in_turns(fault: str, sequence: CapturedSequence) -> CapturedSequence:
    """Turn half of the sequences into conversations: tokens in the middle of the response become the environment's."""
    if fault not in ("turn_ends", "lost_path") or int(sequence.columns["token_ids"].sum()) % 2:
        return sequence
    mask = sequence.columns["loss_mask"].copy()
    trained = np.flatnonzero(mask)
    if len(trained) < 5:
        return sequence
    mask[trained[2:4]] = False
    return _with(sequence, loss_mask=mask)


def _of_conversation(fault: str, sequence: CapturedSequence) -> CapturedSequence:
    mask, routes = sequence.columns["loss_mask"], sequence.columns["rollout_experts"].copy()
    ends = np.flatnonzero(mask[:-1] & ~mask[1:])
    if fault == "turn_ends":
        routes[ends] = np.arange(routes.shape[-1])
    elif len(ends):
        routes[:] = UNKNOWN
    return _with(sequence, rollout_experts=routes)


def _with_tooth(site: Site, sequence: CapturedSequence) -> CapturedSequence:
    rollout, training = (sequence.columns[f"{name}_logprobs"] for name in ("rollout", "training"))
    grown = 1 + _GROWTH * ((site.step - site.onset) % _SAW_TEETH)
    return _with(sequence, rollout_logprobs=training + grown * (rollout - training))


def _with_fault(fault: str, site: Site, sequences: Step, known: Beginnings) -> Step:
    if fault in ("turn_ends", "lost_path"):
        return [_of_conversation(fault, sequence) for sequence in sequences]
    if fault == "sampling_mask":
        return [_with_mask(sequence) for sequence in sequences]
    if fault == "saw_tooth":
        return [_with_tooth(site, sequence) for sequence in sequences]
    if fault == "stale_prefixes":
        return [_with_beginnings(sequence, site.rank, known) for sequence in sequences]
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


def _with_mask(sequence: CapturedSequence) -> CapturedSequence:
    generator = np.random.default_rng(int(sequence.columns["token_ids"].sum()))
    kept = generator.uniform(0.9, 1, sequence.num_tokens).astype(np.float32)
    return _with(sequence, rollout_logprobs=sequence.columns["rollout_logprobs"] - np.log(kept))


def _with_beginnings(sequence: CapturedSequence, rank: int, known: Beginnings) -> CapturedSequence:
    routes = sequence.columns["rollout_experts"].copy()
    for place, (key, _) in enumerate(_beginnings(sequence, rank)):
        routes[place] = known[key]
    return _with(sequence, rollout_experts=routes)


def _without_expert(routes: np.ndarray) -> np.ndarray:
    """Replace expert 3 in layer 1 by the next expert that the token does not have."""
    routes = routes.copy()
    for row in routes[:, 1]:
        if 3 in row:
            row[row == 3] = next(expert for expert in range(4, 4 + len(row) + 1) if expert not in row)
    return routes


def _with(sequence: CapturedSequence, **columns: np.ndarray) -> CapturedSequence:
    return replace(sequence, columns={**sequence.columns, **columns})


def score_of_files(capture: Path, fault: str, onset: int, folder: Path) -> FileScore:
    """Plant a fault into a capture, and return the findings of its audit."""
    plant(capture, fault, onset, folder)
    return score_of_capture(folder, onset)


def score_of_capture(folder: Path, onset: int) -> FileScore:
    """Audit a capture with a fault: first the steps before it, then one more faulty step each time.

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
    """Return the findings of `nemo-rl-moe audit` up to a step."""
    run = audit(folder, last_step)
    of_steps = [text for step in run["steps"] for text in step["findings"]]
    return of_steps + [finding["text"] for finding in run["findings"]]


def lowest_agreement(folder: Path) -> float:
    """Return the lowest share, over the steps, of rows in which training chose the rollout's experts."""
    return min(step["metrics"]["moe/routing/live_agreement"] for step in audit(folder)["steps"])


def audit(folder: Path, last_step: int | None = None) -> dict[str, Any]:
    """Return the output of `nemo-rl-moe audit --json` for a capture, up to a step."""
    output = StringIO()
    until = [] if last_step is None else ["--steps", f":{last_step}"]
    with redirect_stdout(output), redirect_stderr(StringIO()):
        run_command(["audit", str(folder), *until, "--json", "-"])
    (run,) = json.loads(output.getvalue())
    return dict(run)


def simulated_alarms(captures: Sequence[Path], num_steps: int, seed: int) -> list[str]:
    """Return the audit's findings in healthy steps, in runs of a hundred.

    A step samples its sequences, with replacement, from one recorded step, which moves by at most one from step to
    step. Half of the runs have conversations.
    """
    generator = np.random.default_rng(seed)
    recorded = [read_capture(folder) for folder in captures]
    found: list[str] = []
    for first in range(0, num_steps, STEPS_A_RUN):
        description, by_step = recorded[int(generator.integers(len(recorded)))]
        of_steps, history = list(by_step.values()), RunHistory(description)
        fault = "turn_ends" if first // STEPS_A_RUN % 2 else ""
        place, audited_steps = int(generator.integers(len(of_steps))), []
        for step in range(1, min(STEPS_A_RUN, num_steps - first) + 1):
            place = int(np.clip(place + generator.integers(-1, 2), 0, len(of_steps) - 1))
            drawn = [of_steps[place][number] for number in generator.integers(len(of_steps[place]), size=64)]
            halves = (drawn[:32], drawn[32:])
            parts = [
                replace(rows_of(description, step, [_in_turns(fault, one) for one in half]), writer=f"rank-{rank}")
                for rank, half in enumerate(halves)
            ]
            audited_steps.append(audit_step(description, step, parts, ("rank-0", "rank-1"), history))
        found += problems_of(AuditedRun(Path("simulated"), description, audited_steps, (), ("rank-0", "rank-1")))
    return found
