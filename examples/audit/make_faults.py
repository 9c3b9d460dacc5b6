# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Small capture folders, each with one silent failure of routing: the planted examples of docs/gallery.md.

    python examples/audit/make_faults.py --output examples/audit/faults

A step has four sequences, and the model three MoE layers with top-2 of eight experts. Training routes 2% of the rows
differently from the rollout, like rounding does. The seeds are fixed, so that the files are always the same.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from jaxtyping import Int

from nemo_rl_moe.runs.folder.capture_folder import CaptureFolderWriter
from nemo_rl_moe.runs.folder.captured_sequences import UNKNOWN, CaptureDescription, CapturedSequence

Routes = Int[np.ndarray, "tokens layers topk"]
NUM_LAYERS, NUM_EXPERTS, TOPK = 3, 8, 2
NUM_SEQUENCES, NUM_TOKENS, PROMPT = 4, 80, 20
DESCRIPTION = CaptureDescription(tuple(range(NUM_LAYERS)), NUM_EXPERTS, TOPK, "examples/audit/make_faults.py")
FLIPPED = 0.02
FIRST_STEP = 3


@dataclass
class Step:
    """Routes of each sequence of one step.

    Attributes:
        rollout: Routes of the tokens that were fed to the engine: all except the last.
        training: Routes of all tokens.
        before: Routes of the previous step's rollout. Empty in the first step.
        more: Further columns of each sequence.
    """

    rollout: list[Routes]
    training: list[Routes]
    before: Sequence[Routes] = ()
    more: list[dict[str, np.ndarray]] = field(default_factory=lambda: [{} for _ in range(NUM_SEQUENCES)])


@dataclass(frozen=True)
class Fault:
    """A silent failure.

    Attributes:
        plant: Changes a step in place.
        num_healthy: Number of healthy steps before it.
        num_faulty: Number of steps with the fault.
        num_writers: Data-parallel ranks, each with one file and an equal share of the sequences.
        healthy: Makes a step without the fault, from a generator, the routes of the previous rollout, and the step's
            number.
    """

    plant: Callable[[Step], None]
    num_healthy: int = 1
    num_faulty: int = 1
    num_writers: int = 1
    healthy: Callable[[np.random.Generator, Sequence[Routes], int], Step] | None = None


def sampled(generator: np.random.Generator, *shape: int, allowed: Sequence[int] = range(NUM_EXPERTS)) -> Routes:
    """Sample rows of different allowed experts, `[*shape, topk]`."""
    order = generator.random((*shape, len(allowed))).argsort(-1)[..., :TOPK]
    return np.asarray(allowed, dtype=np.int16)[order]


def healthy_step(generator: np.random.Generator, before: Sequence[Routes]) -> Step:
    """Return a step in which rollout and training differ in `FLIPPED` of the rows."""
    step = Step([], [], before)
    for _ in range(NUM_SEQUENCES):
        training = sampled(generator, NUM_TOKENS, NUM_LAYERS)
        rollout = training[:-1].copy()
        flipped = generator.random(rollout.shape[:2]) < FLIPPED
        rollout[flipped] = sampled(generator, int(flipped.sum()))
        step.training.append(training)
        step.rollout.append(rollout)
    return step


def conversations(generator: np.random.Generator, before: Sequence[Routes], number: int) -> Step:
    """Return a step with twice as many sequences, which have one turn and three turns alternately."""
    step, others = healthy_step(generator, before), healthy_step(generator, before)
    step = Step(step.rollout + others.rollout, step.training + others.training, before, step.more + others.more)
    for place, columns in enumerate(step.more):
        columns["loss_mask"] = np.arange(NUM_TOKENS) >= PROMPT
        if place % 2:
            for first in (35, 55):
                columns["loss_mask"][first : first + 8] = False
    return step


def with_logprobs(generator: np.random.Generator, before: Sequence[Routes], number: int) -> Step:
    """Return a step with log-probabilities of rollout and training, which differ by rounding."""
    step = healthy_step(generator, before)
    for columns in step.more:
        logprobs = np.log(generator.uniform(0.2, 1, NUM_TOKENS))
        columns["training_logprobs"] = logprobs.astype(np.float32)
        columns["rollout_logprobs"] = (logprobs + generator.normal(0, 1e-3, NUM_TOKENS)).astype(np.float32)
    return step


def same_prompts(generator: np.random.Generator, before: Sequence[Routes], number: int) -> Step:
    """Return a step with the same token ids as all others, and routes that change a little from step to step."""
    weights = np.random.default_rng(0)
    shape = (NUM_SEQUENCES, NUM_TOKENS, NUM_LAYERS, NUM_EXPERTS)
    first, direction = weights.standard_normal(shape), weights.standard_normal(shape)
    routes = (first + 0.05 * number * direction).argsort(-1)[..., -TOPK:].astype(np.int16)
    ids = np.arange(NUM_SEQUENCES * NUM_TOKENS).reshape(NUM_SEQUENCES, -1)
    more = [{"token_ids": of, "loss_mask": np.arange(NUM_TOKENS) >= PROMPT} for of in ids]
    return Step([of[:-1].copy() for of in routes], list(routes), before, more)


def _nothing(step: Step) -> None:
    """Leave the step healthy."""


def _wrong_layer(step: Step) -> None:
    for rows in step.rollout:
        rows[:, 2] = rows[:, 1]


def _shifted_token(step: Step) -> None:
    for rows in step.rollout:
        rows[1:] = rows[:-1].copy()


def _zeros(step: Step) -> None:
    for rows in step.rollout:
        rows[:] = 0


def _stale_rows(step: Step) -> None:
    step.rollout = [rows.copy() for rows in step.before]


def _repeated_rows(step: Step) -> None:
    step.rollout[1][10:77] = step.rollout[1][9]


def _padded_rows(step: Step) -> None:
    step.rollout = [np.concatenate([rows, rows[:1]]) for rows in step.rollout]


def _swapped_sequences(step: Step) -> None:
    step.rollout[0], step.rollout[1] = step.rollout[1], step.rollout[0]


def _out_of_range(step: Step) -> None:
    for rows in step.rollout:
        rows[:5] = 255


def _duplicates(step: Step) -> None:
    for rows in step.rollout:
        rows[:, 2] = rows[:, 2].max(-1, keepdims=True)


def _dropped_rows(step: Step) -> None:
    for rows in step.rollout[NUM_SEQUENCES // 2 :]:
        rows[:] = UNKNOWN


def _wrong_rank(step: Step) -> None:
    half = NUM_SEQUENCES // 2
    step.rollout[half:] = [rows.copy() for rows in step.before[half:]]


def _stale_experts(step: Step) -> None:
    generator = np.random.default_rng(int(step.training[0].sum()))
    for rows in step.rollout:
        changed = generator.random(rows.shape[:2]) < 0.2
        rows[changed] = sampled(generator, int(changed.sum()))


def _without(step: Step, layer: int, dead: int) -> None:
    generator = np.random.default_rng(int(step.training[0].sum()))
    others = [expert for expert in range(NUM_EXPERTS) if expert != dead]
    for rollout, training in zip(step.rollout, step.training, strict=True):
        training[:, layer] = sampled(generator, len(training), allowed=others)
        rollout[:, layer] = training[:-1, layer]


def _dead_expert(step: Step) -> None:
    _without(step, layer=1, dead=5)


def _hot_expert(step: Step) -> None:
    _without(step, layer=1, dead=5)
    for rollout, training in zip(step.rollout, step.training, strict=True):
        training[:, 1, 0] = rollout[:, 1, 0] = 5


def _turn_ends(step: Step) -> None:
    for rows, columns in zip(step.rollout, step.more, strict=True):
        mask = columns["loss_mask"]
        rows[np.flatnonzero(mask[:-1] & ~mask[1:])] = np.arange(TOPK)


def _lost_path(step: Step) -> None:
    for rows in step.rollout[1::2]:
        rows[:] = UNKNOWN


def _pinned_engine(step: Step) -> None:
    step.rollout = same_prompts(np.random.default_rng(0), (), 2).rollout


def _sampling_mask(step: Step) -> None:
    generator = np.random.default_rng(int(step.training[0].sum()))
    for columns in step.more:
        columns["rollout_logprobs"] -= np.log(generator.uniform(0.9, 1, NUM_TOKENS)).astype(np.float32)


FAULTS: dict[str, Fault] = {
    "healthy": Fault(_nothing),
    "wrong_layer": Fault(_wrong_layer),
    "shifted_token": Fault(_shifted_token),
    "zeros": Fault(_zeros),
    "stale_rows": Fault(_stale_rows),
    "repeated_rows": Fault(_repeated_rows),
    "padded_rows": Fault(_padded_rows),
    "swapped_sequences": Fault(_swapped_sequences),
    "out_of_range": Fault(_out_of_range),
    "duplicates": Fault(_duplicates),
    "dropped_rows": Fault(_dropped_rows, num_faulty=3, num_writers=2),
    "wrong_rank": Fault(_wrong_rank, num_writers=2),
    "stale_experts": Fault(_stale_experts, num_healthy=6, num_faulty=3),
    "dead_expert": Fault(_dead_expert, num_healthy=6, num_faulty=3),
    "hot_expert": Fault(_hot_expert, num_healthy=6, num_faulty=3),
    "turn_ends": Fault(_turn_ends, healthy=conversations),
    "lost_path": Fault(_lost_path, healthy=conversations),
    "pinned_engine": Fault(_pinned_engine, num_healthy=3, num_faulty=6, healthy=same_prompts),
    "sampling_mask": Fault(_sampling_mask, healthy=with_logprobs),
}
"""By name of their folder."""


def write(folder: Path, name: str) -> None:
    """Write the capture of one fault to a folder without a capture."""
    fault = FAULTS[name]
    generator = np.random.default_rng(len(name))
    before: Sequence[Routes] = ()
    for number in range(fault.num_healthy + fault.num_faulty):
        step = healthy_step(generator, before) if fault.healthy is None else fault.healthy(generator, before, number)
        before = [rows.copy() for rows in step.rollout]
        if number >= fault.num_healthy:
            fault.plant(step)
        size = len(step.rollout) // fault.num_writers
        for rank in range(fault.num_writers):
            sequences = [
                CapturedSequence(
                    str(place),
                    NUM_TOKENS,
                    {"rollout_experts": step.rollout[place], "training_experts": step.training[place]}
                    | step.more[place],
                )
                for place in range(rank * size, (rank + 1) * size)
            ]
            path = CaptureFolderWriter(folder, DESCRIPTION).write(FIRST_STEP + number, sequences)
            path.replace(folder / f"step-{FIRST_STEP + number:08d}.rank{rank}-0.parquet")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="gets a folder for each fault")
    output = parser.parse_args().output
    for name in FAULTS:
        write(output / name, name)


if __name__ == "__main__":
    main()
