# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The scorecard of failures that only captures show: engines without the weights, cut vocabularies, broken claims.

Captures are simulated in memory: routers whose weights move on a line, repeated prompts, responses of random tokens,
half of them conversations, two writers. They are audited like files. A fault begins at a step, and is found when a line
of the audit of the steps so far contains its words. Healthy steps follow, in runs of a hundred.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from nemo_rl_moe.routing.audit.audited_run import AuditedRun
from nemo_rl_moe.routing.audit.auditor import AuditedStep, audit_step
from nemo_rl_moe.routing.audit.history import RunHistory
from nemo_rl_moe.routing.audit.summary import problems_of
from nemo_rl_moe.runs.folder.captured_sequences import (
    UNKNOWN,
    CaptureDescription,
    CapturedRows,
    CapturedSequence,
    rows_of,
)

EXAMPLES = """\
examples:
  python benchmarks/engine_faults.py                             all faults, 10,000 healthy steps
  python benchmarks/engine_faults.py --faults saw_tooth --healthy 0"""
LAYERS, EXPERTS, TOPK, POSITIONS = 4, 8, 2, 12
SEQUENCES, PROMPTS, PROMPT, TOKENS = 32, 8, 12, 40
WRITERS = ("rank-0", "rank-1")
STEPS_A_RUN, LONGEST_WAIT = 100, 30
ROUTES, LOGPROBS = ("rollout_experts", "training_experts"), ("rollout_logprobs", "training_logprobs")
DRIFT, FLIPPED, ROUNDING, GAP_A_VERSION = 0.03, 0.005, 1e-3, 2e-3
"""A step's change of router scores of size 1, share of rows that differ by chance, and log-prob gap in nats: with equal
weights, and for each version between both sides."""
CALM = 0.05
"""Spread of the gap for faults that only its trend shows. With 0.2 it has no clear order."""


@dataclass(frozen=True)
class Scene:
    """Properties of a run that are not faults.

    Attributes:
        spread: Standard deviation of the logarithm of the log-prob gap, from step to step.
        same_prompts: Every step has the same prompts.
        is_bitwise: Both sides compute bitwise equal values, and the capture claims this.
        has_indexer: Sparse attention with captured positions.
        lag: Versions from the engine's weights to the trainer's.
    """

    spread: float = 0.2
    same_prompts: bool = True
    is_bitwise: bool = False
    has_indexer: bool = False
    lag: int = 0


@dataclass(frozen=True)
class Fault:
    """A failure from some step on. Steps of the fault are numbered from 0.

    Attributes:
        words: A part of the line that reports it.
        engine: Returns the version of the engine's weights, from the right version and the step.
        prompts_alone: That version only applies to prompts, not to responses.
        changed: Changes a captured sequence.
        bias_stands: The expert bias stops moving.
    """

    title: str
    words: str
    scene: Scene = Scene()
    engine: Callable[[int, int], int] = lambda version, step: version
    prompts_alone: bool = False
    changed: Callable[[CapturedSequence, int, np.random.Generator], CapturedSequence] = lambda one, step, generator: one
    bias_stands: bool = False


def _with(sequence: CapturedSequence, **columns: np.ndarray) -> CapturedSequence:
    return replace(sequence, columns={**sequence.columns, **columns})


def _of_subset(sequence: CapturedSequence, step: int, generator: np.random.Generator) -> CapturedSequence:
    kept = generator.uniform(0.9, 1, sequence.num_tokens)
    return _with(sequence, rollout_logprobs=sequence.columns["rollout_logprobs"] - np.log(kept))


def _in_a_cycle(sequence: CapturedSequence, step: int, generator: np.random.Generator) -> CapturedSequence:
    rollout, training = (sequence.columns[name] for name in LOGPROBS)
    return _with(sequence, rollout_logprobs=training + (1 + step % 7) * (rollout - training))


def _ends(sequence: CapturedSequence) -> np.ndarray:
    mask = sequence.columns["loss_mask"]
    return np.flatnonzero(mask[:-1] & ~mask[1:])


def _with_fillers(sequence: CapturedSequence, step: int, generator: np.random.Generator) -> CapturedSequence:
    routes = sequence.columns["rollout_experts"].copy()
    routes[_ends(sequence)] = np.arange(TOPK)
    return _with(sequence, rollout_experts=routes)


def _without_routes(sequence: CapturedSequence, step: int, generator: np.random.Generator) -> CapturedSequence:
    routes = sequence.columns["rollout_experts"]
    return _with(sequence, rollout_experts=np.full_like(routes, UNKNOWN)) if len(_ends(sequence)) else sequence


def _of_one_version(sequence: CapturedSequence, step: int, generator: np.random.Generator) -> CapturedSequence:
    versions = sequence.columns["weight_versions"]
    return _with(sequence, weight_versions=np.where(versions == UNKNOWN, versions, versions - step))


def _unequal(sequence: CapturedSequence, step: int, generator: np.random.Generator) -> CapturedSequence:
    rollout = sequence.columns["rollout_logprobs"].copy()
    rollout[-1] = np.nextafter(rollout[-1], np.float32(-1))
    return _with(sequence, rollout_logprobs=rollout)


def _of_packed_batch(sequence: CapturedSequence, step: int, generator: np.random.Generator) -> CapturedSequence:
    positions = sequence.columns["rollout_indexer"]
    return _with(sequence, rollout_indexer=np.where(positions == UNKNOWN, positions, positions + TOKENS))


STOOD = "the engine's routes have stood still"
FAULTS: Mapping[str, Fault] = {
    "pinned": Fault("the engine gets no weights", STOOD, engine=lambda version, step: version - step),
    "pinned_new_prompts": Fault(
        "the engine gets no weights, and no prompt comes again",
        "the log-prob gap has grown step by step",
        Scene(same_prompts=False, spread=CALM),
        engine=lambda version, step: version - step,
    ),
    "standing_version": Fault(
        "the engine's weight version stands still", "the rollout's weight version has been", changed=_of_one_version
    ),
    "adapter_twice": Fault(
        "each update counts twice in the engine",
        "times as far as training's",
        engine=lambda version, step: version + step,
    ),
    "stale_prefixes": Fault(
        "a prefix cache of older weights",
        "the engine's routes of prefixes have stood still",
        engine=lambda version, step: version - step,
        prompts_alone=True,
    ),
    "saw_tooth": Fault(
        "a gap that a restart resets every 7 steps",
        "a restart of the engine resets the cause",
        Scene(spread=CALM),
        changed=_in_a_cycle,
    ),
    "turn_ends": Fault("fillers at the ends of turns", "carries filler routes", changed=_with_fillers),
    "lost_path": Fault("conversations without routes", "have no routes", changed=_without_routes),
    "sampling_mask": Fault("log-probs over a top-p subset", "normalised over a subset", changed=_of_subset),
    "unequal": Fault(
        "one log-prob of each sequence is not equal", "are not equal", Scene(is_bitwise=True), changed=_unequal
    ),
    "packed_indexer": Fault(
        "the indexer's positions are those of a packed batch",
        "they count from the packed batch",
        Scene(has_indexer=True),
        changed=_of_packed_batch,
    ),
    "frozen_bias": Fault("the expert bias stands still", "expert bias", bias_stands=True),
}


class MadeRun:
    """A simulated run with a fault after `onset` steps, or a healthy one."""

    def __init__(self, scene: Scene, seed: int, fault: Fault | None = None, onset: int = 0):
        self._scene, self._fault, self._onset = scene, fault, onset
        self._generator = np.random.default_rng(seed)
        shape = (PROMPTS, TOKENS, LAYERS, EXPERTS)
        self._first, self._direction = (self._generator.standard_normal(shape) for _ in range(2))
        self._num_new = 0
        self._bias = np.zeros((LAYERS, EXPERTS))
        self.description = CaptureDescription(
            tuple(range(LAYERS)),
            EXPERTS,
            TOPK,
            is_bitwise=scene.is_bitwise,
            bias_is_updated=True,
            indexer_shape=(1, POSITIONS) if scene.has_indexer else (0, 0),
        )

    def parts(self, step: int) -> Iterator[CapturedRows]:
        """Yield the capture of each writer at a step, counted from 1."""
        fault, faulty = self._fault, step - self._onset  # steps of the fault so far
        if fault is None or not fault.bias_stands or faulty <= 0:
            self._bias += 1e-3 * np.sign(self._generator.standard_normal(self._bias.shape))
        size = np.exp(self._scene.spread * self._generator.standard_normal())
        sequences = [self._sequence(step, number, float(size)) for number in range(SEQUENCES)]
        if fault is not None and faulty > 0:
            sequences = [fault.changed(sequence, faulty, self._generator) for sequence in sequences]
        for rank, writer in enumerate(WRITERS):
            rows = rows_of(self.description, step, sequences[rank :: len(WRITERS)])
            yield replace(rows, writer=writer, expert_bias=self._bias.astype(np.float32))

    def _sequence(self, step: int, number: int, size: float) -> CapturedSequence:
        scene, generator, topic = self._scene, self._generator, number % PROMPTS
        version = max(step - scene.lag, 0)
        engine = self._engine_version(version, step)
        fresh = generator.standard_normal((TOKENS - PROMPT, LAYERS, EXPERTS))
        scores = np.concatenate([self._first[topic][:PROMPT], fresh])
        direction = self._direction[topic]
        training = _chosen(scores + DRIFT * step * direction)
        rollout = training if scene.is_bitwise else _chosen(scores + DRIFT * engine * direction)
        if self._fault is not None and self._fault.prompts_alone:
            rollout[PROMPT:] = _chosen(scores + DRIFT * version * direction)[PROMPT:]
            engine = version
        if not scene.is_bitwise:
            flips = generator.random(rollout.shape[:2]) < FLIPPED
            rollout[flips] = _chosen(generator.standard_normal((int(flips.sum()), EXPERTS)))
        logprobs = -generator.exponential(0.7, TOKENS)
        gap = 0.0 if scene.is_bitwise else size * (ROUNDING + GAP_A_VERSION * abs(step - engine))
        mask = np.arange(TOKENS) >= PROMPT
        if number % 2:  # a conversation: a result in the middle of the response
            mask[PROMPT + 8 : PROMPT + 12] = False
        if scene.same_prompts:
            prompt = 1000 * topic + np.arange(PROMPT)
        else:
            self._num_new += 1
            prompt = 100_000 + 100 * self._num_new + np.arange(PROMPT)
        columns = {
            "token_ids": np.concatenate([prompt, generator.integers(0, 500, TOKENS - PROMPT)]),
            "loss_mask": mask,
            "rollout_experts": rollout[:-1],
            "training_experts": training,
            "rollout_logprobs": (logprobs + gap * generator.standard_normal(TOKENS)).astype(np.float32),
            "training_logprobs": logprobs.astype(np.float32),
            "weight_versions": np.where(mask, version, UNKNOWN),
        }
        if scene.has_indexer:
            columns["rollout_indexer"] = columns["training_indexer"] = _positions(generator)
        return CapturedSequence(f"s{number}", TOKENS, columns)

    def _engine_version(self, version: int, step: int) -> int:
        faulty = step - self._onset
        return version if self._fault is None or faulty <= 0 else self._fault.engine(version, faulty)


def _chosen(scores: np.ndarray) -> np.ndarray:
    return np.sort(np.argpartition(-scores, TOPK - 1, -1)[..., :TOPK], -1).astype(np.int16)


def _positions(generator: np.random.Generator) -> np.ndarray:
    """Return random positions up to each token's, or all if they fit."""
    order = generator.random((TOKENS, 1, TOKENS))
    order[np.arange(TOKENS)[:, None, None] < np.arange(TOKENS)] = np.inf
    ranked = np.sort(order.argsort(-1)[..., :POSITIONS], -1)
    return np.where(np.arange(POSITIONS) <= np.arange(TOKENS)[:, None, None], ranked, UNKNOWN)


@dataclass(frozen=True)
class Score:
    """One row of the table.

    Attributes:
        onset: Steps before the fault.
        steps: Steps until the report, with the first faulty one. None if it was not reported.
        reported: The line.
        others: Other lines on faulty steps, up to the report.
        false_alarms: Lines about earlier steps.
    """

    fault: str
    onset: int
    steps: int | None
    reported: str
    others: tuple[str, ...]
    false_alarms: tuple[str, ...]


def score_of(name: str, onset: int, seed: int) -> Score:
    """Return the audit's score for a fault."""
    fault = FAULTS[name]
    run = MadeRun(fault.scene, seed, fault, onset)
    history, steps = RunHistory(run.description), list[AuditedStep]()
    early: tuple[str, ...] = ()
    said: list[str] = []
    for step in range(1, onset + LONGEST_WAIT + 1):
        steps.append(audit_step(run.description, step, run.parts(step), WRITERS, history))
        said = _said(run.description, steps)
        if step == onset:
            early = tuple(said)
        found = [line for line in said if fault.words in line and line not in early]
        if step > onset and found:
            others = tuple(line for line in said if line not in found and line not in early)
            return Score(name, onset, step - onset, found[0], others, early)
    return Score(name, onset, None, "", tuple(said), early)


def _said(description: CaptureDescription, steps: Sequence[AuditedStep]) -> list[str]:
    return problems_of(AuditedRun(Path("made"), description, list(steps), (), WRITERS))


def healthy_lines(num_steps: int, seed: int) -> list[str]:
    """Return the audit's lines on healthy steps, in runs of a hundred of every kind."""
    found = []
    for number, first in enumerate(range(0, num_steps, STEPS_A_RUN)):
        scene = Scene(
            spread=(0.2, 0.5, 1.0)[number % 3],
            same_prompts=number % 2 == 0,
            is_bitwise=number % 10 == 7,
            has_indexer=number % 10 == 3,
            lag=number % 4,
        )
        run = MadeRun(scene, seed + number)
        history = RunHistory(run.description)
        audited = [
            audit_step(run.description, step, run.parts(step), WRITERS, history)
            for step in range(1, min(STEPS_A_RUN, num_steps - first) + 1)
        ]
        found += _said(run.description, audited)
    return found


def table(scores: Sequence[Score]) -> str:
    """Return the scores as a Markdown table, with a row for each fault."""
    lines = ["| fault | reported after | finding |", "|---|---|---|"]
    for name in dict.fromkeys(score.fault for score in scores):
        of_fault = [score for score in scores if score.fault == name]
        waits = sorted({LONGEST_WAIT + 1 if score.steps is None else score.steps for score in of_fault})
        after = "not found" if waits[-1] > LONGEST_WAIT else " to ".join(map(str, dict.fromkeys((waits[0], waits[-1]))))
        lines.append(f"| {FAULTS[name].title} | {after} | {FAULTS[name].words} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", nargs="+", choices=list(FAULTS), default=list(FAULTS), metavar="NAME")
    parser.add_argument("--onsets", nargs="+", type=int, default=[6, 12], metavar="N", help="steps before (6 12)")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="runs of each (default: 3)")
    parser.add_argument("--healthy", type=int, default=10_000, metavar="N", help="healthy steps (default: 10000)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="all numbers as JSON")
    options = parser.parse_args(arguments)
    began = time.perf_counter()
    scores = [
        score_of(name, onset, seed)
        for name in options.faults
        for onset in options.onsets
        for seed in range(options.seeds)
    ]
    print(f"faults: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    healthy = healthy_lines(options.healthy, seed=1000)
    print(f"with healthy steps: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    print(table(scores))
    before = sum(len(score.false_alarms) for score in scores)
    print(f"\nfalse alarms: {len(healthy)} in {options.healthy:,} healthy steps, {before} in the steps before faults")
    for line in healthy:
        print(f"  {line}")
    if options.output is not None:
        content = {"scores": [asdict(score) for score in scores], "healthy": healthy}
        options.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
