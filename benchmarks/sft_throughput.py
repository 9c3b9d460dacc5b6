# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of supervised fine-tuning on CPU cores, with and without MoE metrics. Prints one JSON line.

This runs the real trainer (Ray workers, Megatron-Core, the data loader, the training loop and the loggers) on a small
Qwen3-MoE (4 layers, 8 experts, top 2). Two policies, one with MoE metrics and one without, train in turns on the same
batches, so that other load of the machine affects both.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from small_model import (
    CONFIGS,
    CONSTANT_RATE,
    MODEL,
    TOKENIZER,
    VOCABULARY,
    StepClock,
    add_layer_spec,
    add_workers,
    confine,
    family_cpu_seconds,
    make_parser,
    not_negative,
    one_epoch,
    open_loggers,
    overrides_of,
    positive,
    recorder_without_checkpoints,
    release,
    require_whole_microbatches,
    running_ray,
    start_policy,
    surroundings,
    write_model,
)

from nemo_rl_moe.algorithms.sft import train_sft
from nemo_rl_moe.algorithms.step_recorder import RecordSinks
from nemo_rl_moe.config.loading import load_config
from nemo_rl_moe.config.schema import SFTMasterConfig
from nemo_rl_moe.data.chat import TokenizedExample
from nemo_rl_moe.data.loader import GlobalBatchLoader
from nemo_rl_moe.distributed.cluster import RayCluster
from nemo_rl_moe.distributed.node_tools import threads_per_worker, usable_cores
from nemo_rl_moe.models.policy.lm_policy import MegatronPolicy
from nemo_rl_moe.runs.loggers.artifacts import ArtifactTables
from nemo_rl_moe.runs.loggers.fan_out import FanOutLogger

BATCH_SIZE = 8
SEQUENCE_LENGTH = 128
EXAMPLES = """\
examples:
  python benchmarks/sft_throughput.py                        one worker with one thread
  python benchmarks/sft_throughput.py --workers 2            data-parallel, one thread each
  python benchmarks/sft_throughput.py --layer-spec local     Megatron-Core's own modules, for comparison
  taskset -c 0 python benchmarks/sft_throughput.py           driver, Ray and worker on one core

tokens_per_second.median is the one to quote: of all measured steps, logging included, with the steps of both policies
in turns. On a busy machine it says little; run what you compare in turns and compare ratios, and look at
tokens_per_cpu_second, which counts the CPU time of all processes instead of the time on the clock.
on_to_off is the speed with MoE metrics divided by the speed without."""


@dataclass
class Contestant:
    """One policy and its measurements.

    Attributes:
        loggers: The loop's loggers, the clock last.
        tables: Tables for the load matrices.
        blocks: Seconds of each step, by block of steps.
        cpu_seconds: CPU time of all processes while it trained.
        losses: Loss of each measured step.
        num_steps: Steps so far, with the warm-up.
    """

    config: SFTMasterConfig
    policy: MegatronPolicy
    loggers: FanOutLogger
    tables: ArtifactTables
    clock: StepClock
    blocks: list[list[float]] = field(default_factory=list)
    cpu_seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    num_steps: int = 0

    def train(self, loader: GlobalBatchLoader, *, measured: bool) -> None:
        """Train one epoch, which is a block of steps, in the package's loop."""
        before = family_cpu_seconds()
        done = self.num_steps
        self.num_steps += len(loader)
        self.clock.start()
        sinks = RecordSinks(self.loggers, lambda step, name, array: self.tables.write(done + step, name, array))
        recorder = recorder_without_checkpoints(self.config.policy, sinks)
        train_sft(self.config.sft, self.policy, loader, None, recorder)
        if measured:
            self.cpu_seconds += family_cpu_seconds() - before
            self.blocks.append([step["seconds"] for step in self.clock.steps])
            self.losses += [step["train/loss"] for step in self.clock.steps]


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    cores = confine(options.workers)
    with tempfile.TemporaryDirectory(prefix="sft_throughput_") as scratch, ExitStack() as stack:
        folder = Path(scratch)
        num_parameters = write_model(folder / "model")
        stack.enter_context(running_ray(2 * options.workers))
        threads = threads_per_worker(usable_cores(), options.workers)
        configs = [make_config(folder / "model", options, track_moe_metrics=tracks) for tracks in (False, True)]
        num_steps = options.warmup + options.steps
        off, on = (
            start_contestant(config, num_steps, folder / name, stack)
            for config, name in zip(configs, ("off", "on"), strict=True)
        )
        release(cores)
        race([off, on], options)
    result = {
        "name": "sft_throughput",
        "moe_metrics_off": summary(off),
        "moe_metrics_on": summary(on),
        "on_to_off": round(median_ratio(off.blocks, on.blocks), 4),
        "losses_identical": off.losses == on.losses,
        "last_loss": off.losses[-1],
        "tokens_per_step": BATCH_SIZE * SEQUENCE_LENGTH,
        "steps": options.steps,
        "workers": options.workers,
        "threads_per_worker": threads,
        "micro_batch_size": options.micro_batch_size,
        "layer_spec": options.layer_spec,
        "model": MODEL | {"num_parameters": num_parameters, "precision": "float32"},
        **surroundings(),
    }
    print(json.dumps(result))


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, EXAMPLES)
    parser.add_argument("--steps", type=positive, default=40, metavar="N", help="measured steps of each (default: 40)")
    parser.add_argument("--warmup", type=not_negative, default=5, metavar="N", help="steps before these (default: 5)")
    parser.add_argument("--block", type=positive, default=10, metavar="N", help="steps of one turn (default: 10)")
    add_workers(parser)
    parser.add_argument(
        "--micro-batch-size",
        type=int,
        choices=(1, 2, 4, 8),
        default=4,
        help="sequences of a forward pass; a step has 8 over all workers (default: 4)",
    )
    add_layer_spec(parser)
    options = parser.parse_args(arguments)
    require_whole_microbatches(parser, options, BATCH_SIZE, "sequences")
    return options


def start_contestant(config: SFTMasterConfig, num_steps: int, run_folder: Path, stack: ExitStack) -> Contestant:
    """Start one policy with separate loggers. The stack ends both."""
    policy = start_policy(config, RayCluster(config.cluster), stack, seed=config.sft.seed, num_steps=num_steps)
    run_folder.mkdir()
    clock = StepClock()
    loggers, console = open_loggers(run_folder, clock, stack)
    return Contestant(config, policy, loggers, ArtifactTables(run_folder, console.warn), clock)


def make_config(model: Path, options: argparse.Namespace, *, track_moe_metrics: bool) -> SFTMasterConfig:
    """Return the demo's configuration with this benchmark's sizes."""
    values: dict[str, Any] = {
        **one_epoch("sft"),
        "policy.model_name": model,
        "policy.tokenizer.name": TOKENIZER,
        "policy.train_global_batch_size": BATCH_SIZE,
        "policy.train_micro_batch_size": options.micro_batch_size,
        "policy.max_total_sequence_length": SEQUENCE_LENGTH,
        "policy.max_grad_norm": 1.0,
        "policy.megatron_cfg.layer_spec": options.layer_spec,
        "policy.megatron_cfg.moe_aux_loss_coeff": 0.01,
        "policy.megatron_cfg.track_moe_metrics": track_moe_metrics,
        "policy.megatron_cfg.moe_per_layer_logging": track_moe_metrics,
        **CONSTANT_RATE,
        "cluster.cpu_workers_per_node": options.workers,
    }
    return load_config(CONFIGS / "sft_tiny_moe.yaml", overrides_of(values), check_paths=False)


def race(contestants: Sequence[Contestant], options: argparse.Namespace) -> None:
    """Let all train the same blocks of steps in turns, in changing order."""
    sizes = [min(options.block, options.steps - done) for done in range(0, options.steps, options.block)]
    if options.warmup:
        for contestant in contestants:
            contestant.train(random_batches(options.warmup, seed=0), measured=False)
    for number, size in enumerate(sizes, start=1):
        for contestant in contestants if number % 2 else reversed(contestants):
            contestant.train(random_batches(size, seed=number), measured=True)


def random_batches(num_batches: int, seed: int) -> GlobalBatchLoader:
    """Return sequences of random tokens, all of which are trained on."""
    generator = np.random.default_rng(seed)
    trained = np.ones(SEQUENCE_LENGTH, dtype=np.bool_)
    examples = [
        TokenizedExample(tokens, trained, truncated=False, sample_id=f"random:{index}")
        for index, tokens in enumerate(
            generator.integers(VOCABULARY, size=(num_batches * BATCH_SIZE, SEQUENCE_LENGTH), dtype=np.int32)
        )
    ]
    return GlobalBatchLoader(examples, BATCH_SIZE, pad_token_id=0, seed=seed)


def summary(contestant: Contestant) -> dict[str, Any]:
    """Return the speeds over all measured steps."""
    seconds = [each for block in contestant.blocks for each in block]
    tokens = BATCH_SIZE * SEQUENCE_LENGTH
    median, best = statistics.median(seconds), min(seconds)
    return {
        "tokens_per_second": {"median": round(tokens / median, 1), "best": round(tokens / best, 1)},
        "seconds_per_step": {"median": round(median, 5), "best": round(best, 5)},
        "tokens_per_cpu_second": round(tokens * len(seconds) / contestant.cpu_seconds, 1),
    }


def median_ratio(numerators: Sequence[Sequence[float]], denominators: Sequence[Sequence[float]]) -> float:
    """Return the median over the blocks of the ratio of their medians. Blocks with the same number are neighbours."""
    pairs = zip(numerators, denominators, strict=True)
    return statistics.median(statistics.median(above) / statistics.median(below) for above, below in pairs)


if __name__ == "__main__":
    main()
