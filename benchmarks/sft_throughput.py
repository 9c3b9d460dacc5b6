# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Tokens a second of supervised fine-tuning on CPU cores, with MoE metrics and without. Prints one JSON line.

What runs is the real trainer: Ray workers, Megatron-Core, the data loader, the training loop and the loggers, on a
small Qwen3-MoE (4 layers, 8 experts, top 2). Two policies, one that tracks MoE metrics and one that does not, train in
turns on the same batches, so that whatever else the machine does slows both.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from small_model import (
    MODEL,
    REPOSITORY,
    VOCABULARY,
    confine,
    family_cpu_seconds,
    not_negative,
    one_epoch_of_sft,
    open_loggers,
    positive,
    recorder_without_checkpoints,
    release,
    running_ray,
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
from nemo_rl_moe.loggers.artifacts import ArtifactTables
from nemo_rl_moe.loggers.fan_out import FanOutLogger
from nemo_rl_moe.models.hf_files import find_model
from nemo_rl_moe.models.policy.lm_policy import MegatronPolicy
from nemo_rl_moe.run_folder.folder import collect_versions
from nemo_rl_moe.run_folder.metrics import RunOutcome

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
class StepClock:
    """A logger that is told last of each step, so that the time between two calls is a whole step's.

    Attributes:
        seconds: Of each step since the last `start`.
        losses: Of the same steps.
    """

    name = "clock"
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    _last: float = 0.0

    def start(self) -> None:
        """Forgets what was and begins a step."""
        self.seconds, self.losses = [], []
        self._last = time.perf_counter()

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Ends a step and begins the next."""
        now = time.perf_counter()
        self.seconds.append(now - self._last)
        self.losses.append(metrics["train/loss"])
        self._last = now

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Does nothing."""

    def close(self, outcome: RunOutcome = "finished") -> None:
        """Does nothing."""


@dataclass
class Contestant:
    """One policy and what was measured of it.

    Attributes:
        config: Its configuration.
        policy: Its workers.
        loggers: What the loop logs to; the clock is the last of them.
        tables: Where the load matrices go.
        clock: The clock.
        blocks: Seconds of each step, by block of steps.
        cpu_seconds: CPU time of all processes while it trained.
        losses: Of each measured step.
        num_steps: Steps trained so far, warm-up included.
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
        """Trains one epoch, a block of steps, in the product's own loop."""
        before = family_cpu_seconds()
        done = self.num_steps
        self.num_steps += len(loader)
        self.clock.start()
        sinks = RecordSinks(self.loggers, lambda step, name, array: self.tables.write(done + step, name, array))
        recorder = recorder_without_checkpoints(self.config.policy, sinks)
        train_sft(self.config.sft, self.policy, loader, None, recorder)
        if measured:
            self.cpu_seconds += family_cpu_seconds() - before
            self.blocks.append(self.clock.seconds)
            self.losses += self.clock.losses


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the command line, runs, and prints the result."""
    options = parse_arguments(arguments)
    cores = confine(options.workers)
    with tempfile.TemporaryDirectory(prefix="sft_throughput_") as scratch, ExitStack() as stack:
        folder = Path(scratch)
        num_parameters = write_model(folder / "model")
        stack.enter_context(running_ray(2 * options.workers))
        threads = threads_per_worker(usable_cores(), options.workers)
        start = partial(start_contestant, folder, options, stack)
        off, on = start(track_moe_metrics=False), start(track_moe_metrics=True)
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
        "load_average": round(os.getloadavg()[0], 2),
        "versions": collect_versions(),
    }
    print(json.dumps(result))


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    parser.add_argument("--steps", type=positive, default=40, metavar="N", help="measured steps of each (default: 40)")
    parser.add_argument("--warmup", type=not_negative, default=5, metavar="N", help="steps before those (default: 5)")
    parser.add_argument("--block", type=positive, default=10, metavar="N", help="steps of one turn (default: 10)")
    parser.add_argument(
        "--workers", type=int, choices=(1, 2, 4, 8), default=1, help="data-parallel ranks, one thread each (default: 1)"
    )
    parser.add_argument(
        "--micro-batch-size",
        type=int,
        choices=(1, 2, 4, 8),
        default=4,
        help="sequences of a forward pass; a step has 8 over all workers (default: 4)",
    )
    parser.add_argument(
        "--layer-spec",
        choices=("auto", "local"),
        default="auto",
        help="auto: the fastest modules there are; local: Megatron-Core's own (default: auto)",
    )
    options = parser.parse_args(arguments)
    if BATCH_SIZE % (options.micro_batch_size * options.workers):
        parser.error(
            f"--micro-batch-size {options.micro_batch_size} x --workers {options.workers} does not divide the"
            f" {BATCH_SIZE} sequences of a step; nearest: --micro-batch-size {BATCH_SIZE // options.workers}"
        )
    return options


def start_contestant(
    folder: Path, options: argparse.Namespace, stack: ExitStack, *, track_moe_metrics: bool
) -> Contestant:
    """Starts one policy with loggers of its own; the stack ends both."""
    config = make_config(folder / "model", options, track_moe_metrics=track_moe_metrics)
    cluster = RayCluster(config.cluster)
    stack.callback(cluster.shutdown)
    policy = MegatronPolicy(
        config,
        cluster,
        seed=config.sft.seed,
        num_steps=options.warmup + options.steps,
        source=find_model(config.policy),
        model_files={},
    )
    stack.callback(policy.shutdown)
    run_folder = folder / f"moe_metrics_{track_moe_metrics}"
    run_folder.mkdir()
    clock = StepClock()
    loggers, console = open_loggers(run_folder, clock, stack)
    return Contestant(config, policy, loggers, ArtifactTables(run_folder, console.warn), clock)


def make_config(model: Path, options: argparse.Namespace, *, track_moe_metrics: bool) -> SFTMasterConfig:
    """The demo's configuration with this benchmark's sizes."""
    values: dict[str, Any] = {
        **one_epoch_of_sft(model),
        "policy.train_global_batch_size": BATCH_SIZE,
        "policy.train_micro_batch_size": options.micro_batch_size,
        "policy.max_total_sequence_length": SEQUENCE_LENGTH,
        "policy.max_grad_norm": 1.0,
        "policy.megatron_cfg.layer_spec": options.layer_spec,
        "policy.megatron_cfg.moe_aux_loss_coeff": 0.01,
        "policy.megatron_cfg.track_moe_metrics": track_moe_metrics,
        "policy.megatron_cfg.moe_per_layer_logging": track_moe_metrics,
        "policy.megatron_cfg.optimizer.lr": 1e-4,
        "policy.megatron_cfg.optimizer.min_lr": 1e-4,
        "policy.megatron_cfg.scheduler.lr_decay_style": "constant",
        "policy.megatron_cfg.scheduler.lr_warmup_iters": 0,
        "data.validation": "null",
        "cluster.cpu_workers_per_node": options.workers,
    }
    overrides = [f"{key}={value}" for key, value in values.items()]
    return load_config(REPOSITORY / "examples" / "configs" / "sft_tiny_moe.yaml", overrides, check_paths=False)


def race(contestants: Sequence[Contestant], options: argparse.Namespace) -> None:
    """Lets all train the same blocks of steps in turns; who begins changes with each block."""
    sizes = [min(options.block, options.steps - done) for done in range(0, options.steps, options.block)]
    if options.warmup:
        for contestant in contestants:
            contestant.train(random_batches(options.warmup, seed=0), measured=False)
    for number, size in enumerate(sizes, start=1):
        for contestant in contestants if number % 2 else reversed(contestants):
            contestant.train(random_batches(size, seed=number), measured=True)


def random_batches(num_batches: int, seed: int) -> GlobalBatchLoader:
    """Sequences of random tokens, all of which are trained on."""
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
    """Speeds over all measured steps."""
    seconds = [each for block in contestant.blocks for each in block]
    tokens = BATCH_SIZE * SEQUENCE_LENGTH
    median, best = statistics.median(seconds), min(seconds)
    return {
        "tokens_per_second": {"median": round(tokens / median, 1), "best": round(tokens / best, 1)},
        "seconds_per_step": {"median": round(median, 5), "best": round(best, 5)},
        "tokens_per_cpu_second": round(tokens * len(seconds) / contestant.cpu_seconds, 1),
    }


def median_ratio(numerators: Sequence[Sequence[float]], denominators: Sequence[Sequence[float]]) -> float:
    """Median over the blocks of the ratio of their medians: blocks of one number ran next to each other."""
    pairs = zip(numerators, denominators, strict=True)
    return statistics.median(statistics.median(above) / statistics.median(below) for above, below in pairs)


if __name__ == "__main__":
    main()
