# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Seconds per step of synchronous and asynchronous GRPO: real runs on two CPU cores. Prints one JSON line per case.

A tiny model with random weights trains in one process and generates in another (`backend: megatron_separate`), with a
thread each. Both modes run in turns, each as `nemo-rl-moe grpo`, so that other load of the machine slows both.
--cases determines which part of a step is longer, since a decoding step costs nearly as much for few sequences as for
many, and training does not. Nearly all responses have the maximum length. Routing is not captured.

The bound is the gain of a perfect overlap: a synchronous step in which generation with rewards overlaps everything else
except the refit and its check, which need trainer and engine. Two parallel processes may each be slower than one alone,
since cores share caches and memory, and virtual cores sometimes one core. Therefore two synchronous runs are timed in
parallel too, and the bound includes that slowdown.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from small_model import CONFIGS, REPOSITORY, TOKENIZER, make_parser, overrides_of, positive, surroundings

from nemo_rl_moe.demo_data import main as make_data

EXAMPLES = """\
examples:
  python benchmarks/asynchronous_runs.py
  python benchmarks/asynchronous_runs.py --cases 8x64 --rounds 5   8 prompts a step, 64 tokens a response"""
CONFIG = CONFIGS / "grpo_tiny_moe_async_separate.yaml"
# Modes of the runs that are started in parallel.
KINDS = {
    "synchronous": ["synchronous"],
    "asynchronous": ["asynchronous"],
    "synchronous_side_by_side": ["synchronous", "synchronous"],
}
WARM_UP_STEPS = 5


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    with tempfile.TemporaryDirectory() as data:
        make_data(["--output", data, "--seed", "0", "--num-train", "64", "--num-validation", "16"])
        for sizes in options.cases:
            row = measured(sizes, Path(data), options)
            print(
                json.dumps({"name": "asynchronous_runs", **row, "rounds": options.rounds, **surroundings()}), flush=True
            )


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, EXAMPLES)
    parser.add_argument(
        "--cases",
        type=case,
        nargs="+",
        default=[Case(16, 32), Case(4, 256)],
        metavar="PxT",
        help="P prompts a step, of 8 responses each, of at most T tokens (default: 16x32 4x256)",
    )
    parser.add_argument("--rounds", type=positive, default=3, metavar="N", help="runs of each kind (default: 3)")
    parser.add_argument("--steps", type=positive, default=20, metavar="N", help="measured steps of a run (default: 20)")
    return parser.parse_args(arguments)


class Case(NamedTuple):
    """Prompts per step, and largest number of tokens of a response."""

    prompts: int
    tokens: int


def case(text: str) -> Case:
    """Parse a case on the command line."""
    prompts, _, tokens = text.partition("x")
    return Case(positive(prompts), positive(tokens))


@dataclass(frozen=True)
class Timing:
    """Mean seconds of a run's steps.

    Attributes:
        step: From the end of one step to the end of the next.
        generation: Until all responses have rewards.
        refit: Until the engine's new weights are checked.
    """

    step: float
    generation: float
    refit: float

    @property
    def training(self) -> float:
        """Seconds of the rest of a synchronous step."""
        return self.step - self.generation - self.refit

    def overlapped(self, slowdown: float) -> float:
        """Return the seconds of a synchronous step if generation and training overlapped."""
        shorter, longer = sorted((self.generation, self.training))
        return self.refit + slowdown * shorter + longer - shorter


def measured(sizes: Case, data: Path, options: argparse.Namespace) -> dict[str, object]:
    """Return the figures for one size of step, from runs of every kind in turns."""
    found: dict[str, list[Timing]] = {kind: [] for kind in KINDS}
    for repeat in range(options.rounds):
        for kind in KINDS if repeat % 2 == 0 else reversed(KINDS):
            run = f"{sizes.prompts}x{sizes.tokens}, round {repeat + 1} of {options.rounds}, {kind.replace('_', ' ')}"
            print(run, file=sys.stderr, flush=True)
            found[kind] += timed(KINDS[kind], sizes, data, options.steps)
    return {**sizes._asdict(), **figures(found)}


def figures(found: Mapping[str, Sequence[Timing]]) -> dict[str, float]:
    """Compute speed-up and bound from the medians over runs."""
    synchronous = median_of(found["synchronous"])
    step = median_of(found["asynchronous"]).step
    slowdown = max(1.0, median_of(found["synchronous_side_by_side"]).step / synchronous.step)
    bound = synchronous.step / synchronous.overlapped(slowdown)
    return {
        "synchronous_step_s": synchronous.step,
        "generation_s": synchronous.generation,
        "training_s": synchronous.training,
        "refit_s": synchronous.refit,
        "asynchronous_step_s": step,
        "speedup": synchronous.step / step,
        "slowdown_side_by_side": slowdown,
        "bound": bound,
        "bound_without_slowdown": synchronous.step / synchronous.overlapped(1.0),
        "share_of_bound": synchronous.step / step / bound,
    }


def median_of(timings: Sequence[Timing]) -> Timing:
    """Return the median of each part over runs."""
    return Timing(*map(statistics.median, zip(*map(astuple, timings), strict=True)))


def timed(modes: Sequence[str], sizes: Case, data: Path, steps: int) -> list[Timing]:
    """Run GRPO in each of `modes` in parallel, and return the seconds per step of each.

    Raises:
        RuntimeError: A run failed. Contains the end of its output.
    """
    with tempfile.TemporaryDirectory() as root:
        folders = [Path(root) / str(index) for index in range(len(modes))]
        with ThreadPoolExecutor(len(modes)) as pool:
            return list(pool.map(lambda mode, folder: timed_run(mode, sizes, data, steps, folder), modes, folders))


def timed_run(mode: str, sizes: Case, data: Path, steps: int, folder: Path) -> Timing:
    """Run GRPO once, with its logs in `folder`, and return its seconds per step."""
    command = [sys.executable, "-m", "nemo_rl_moe.cli", "grpo", "--config", str(CONFIG)]
    command += overrides(mode, sizes, data, steps, folder)
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{mode} run, exit code {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    (metrics,) = folder.glob("*/metrics.jsonl")
    return timing_of([json.loads(line) for line in metrics.read_text().splitlines()])


def overrides(mode: str, sizes: Case, data: Path, steps: int, folder: Path) -> list[str]:
    """Return a run's settings as command-line arguments."""
    batch = sizes.prompts * 8
    return overrides_of(
        {
            "grpo.rollouts.mode": mode,
            "grpo.num_prompts_per_step": sizes.prompts,
            "grpo.max_num_steps": WARM_UP_STEPS + steps,
            "grpo.max_num_epochs": 100,
            "grpo.val_period": 0,
            "grpo.val_at_start": "false",
            "policy.train_global_batch_size": batch,
            "policy.train_micro_batch_size": max(size for size in range(1, 65) if batch % size == 0),
            "policy.model_name": TOKENIZER,
            "policy.init": "random",
            "policy.max_total_sequence_length": sizes.tokens + 32,
            "policy.generation.max_new_tokens": sizes.tokens,
            "policy.megatron_cfg.capture_routing": "false",
            "data.train.path": data / "grpo.jsonl",
            "data.validation.path": data / "validation_prompts.jsonl",
            "checkpointing.enabled": "false",
            "cluster.cpu_workers_per_node": 1,
            "cluster.roles.generation.cpu_workers_per_node": 1,
            "logger.log_dir": folder,
            "logger.wandb_enabled": "false",
            "logger.mlflow_enabled": "false",
            "logger.num_samples_to_print": 0,
            "logger.expert_load_plots.every_steps": 0,
            **({"loss_fn.importance_sampling_correction": "none"} if mode == "synchronous" else {}),
        }
    )


def timing_of(records: Sequence[Mapping[str, Any]]) -> Timing:
    """Compute a run's seconds from its records, without the warm-up."""
    ends, timings = [], []
    for record in records:
        metrics = record["metrics"]
        if "timing/step/seconds" in metrics:
            ends.append(record["time"])
            timings.append([metrics[f"timing/{phase}/seconds"] for phase in ("generation", "refit", "refit_check")])
    measured_ends = ends[WARM_UP_STEPS - 1 :]
    generation, refit, check = (statistics.fmean(phase) for phase in zip(*timings[WARM_UP_STEPS:], strict=True))
    return Timing((measured_ends[-1] - measured_ends[0]) / (len(measured_ends) - 1), generation, refit + check)


if __name__ == "__main__":
    main()
