# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Tokens a second of direct preference optimization on CPU cores. Prints one JSON line.

What runs is the real trainer: Ray workers, Megatron-Core, the data loader, the training loop with MoE metrics, and the
loggers, on a small Qwen3-MoE (4 layers, 8 experts, top 2) with random weights. A step is 8 pairs, 16 sequences of
exactly 128 tokens: 32 of a prompt that a pair shares and 96 of each response. With the reference in the step it is one
forward pass of the reference, then a forward and a backward pass and an update of the policy; its tokens count once.
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
from pathlib import Path
from typing import Any

import numpy as np
from small_model import (
    MODEL,
    REPOSITORY,
    VOCABULARY,
    confine,
    family_cpu_seconds,
    open_loggers,
    positive,
    release,
    running_ray,
    write_model,
)

from nemo_rl_moe.algorithms.dpo import train_dpo
from nemo_rl_moe.algorithms.step_recorder import RecordSinks, StepRecorder
from nemo_rl_moe.checkpoints.state import LoopState
from nemo_rl_moe.config.loading import load_dpo_config
from nemo_rl_moe.config.schema import DPOMasterConfig
from nemo_rl_moe.data.chat import TokenizedExample
from nemo_rl_moe.data.dataset import DataReport
from nemo_rl_moe.data.loader import TokenStore
from nemo_rl_moe.data.preferences import WORDS, PreferenceDataset
from nemo_rl_moe.distributed.cluster import RayCluster
from nemo_rl_moe.distributed.node_tools import threads_per_worker, usable_cores
from nemo_rl_moe.launch.dpo import Pairs
from nemo_rl_moe.loggers.artifacts import ArtifactTables
from nemo_rl_moe.models.hf_files import find_model
from nemo_rl_moe.models.policy.lm_policy import MegatronPolicy
from nemo_rl_moe.run_folder.folder import collect_versions
from nemo_rl_moe.run_folder.metrics import RunOutcome

NUM_PAIRS, PROMPT_LENGTH, SEQUENCE_LENGTH = 8, 32, 128
TOKENS_PER_STEP = 2 * NUM_PAIRS * SEQUENCE_LENGTH
REFERENCE_PHASE = "timing/reference_logprobs/seconds"
EXAMPLES = """\
examples:
  python benchmarks/dpo_throughput.py                                   one worker with one thread
  python benchmarks/dpo_throughput.py --workers 2                       data-parallel, one thread each
  python benchmarks/dpo_throughput.py --reference-logprobs precompute   the reference measures before the first step
  taskset -c 0 python benchmarks/dpo_throughput.py                      driver, Ray and worker on one core

tokens_per_second.median is the one to quote: of all measured steps, logging included. On a busy machine it says little;
run what you compare in turns and compare ratios, and look at tokens_per_cpu_second, which counts the CPU time of all
processes instead of the time on the clock."""


@dataclass
class StepClock:
    """A logger that keeps what each step took.

    Attributes:
        warmup: Steps before the measured ones.
        steps: The metrics of each step, and under `seconds` the time since the step before it, logging included.
        cpu_seconds: CPU time of all processes at the end of the warm-up and of the last step.
    """

    warmup: int
    name = "clock"
    steps: list[Mapping[str, float]] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    _last: float = field(default_factory=time.perf_counter)

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Ends a step and begins the next."""
        now = time.perf_counter()
        self.steps.append(dict(metrics) | {"seconds": now - self._last})
        if step == self.warmup:
            self.cpu_seconds.append(family_cpu_seconds())
        self._last = time.perf_counter()

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Does nothing."""

    def close(self, outcome: RunOutcome = "finished") -> None:
        """Does nothing."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the command line, runs, and prints the result."""
    options = parse_arguments(arguments)
    cores = confine(options.workers)
    clock = StepClock(options.warmup)
    with tempfile.TemporaryDirectory(prefix="dpo_throughput_") as scratch, ExitStack() as stack:
        folder = Path(scratch)
        num_parameters = write_model(folder / "model")
        stack.enter_context(running_ray(options.workers))
        threads = threads_per_worker(usable_cores(), options.workers)
        config = make_config(folder / "model", options)
        run(config, random_pairs(options.warmup + options.steps), folder, clock, stack, cores)
    result = summary(clock) | {
        "tokens_per_step": TOKENS_PER_STEP,
        "steps": options.steps,
        "workers": options.workers,
        "threads_per_worker": threads,
        "micro_batch_size": options.micro_batch_size,
        "reference_logprobs": options.reference_logprobs,
        "layer_spec": options.layer_spec,
        "model": MODEL | {"num_parameters": num_parameters, "precision": "float32"},
        "load_average": round(os.getloadavg()[0], 2),
        "versions": collect_versions(),
    }
    print(json.dumps({"name": "dpo_throughput"} | result))


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=positive, default=40, metavar="N", help="measured steps (default: 40)")
    parser.add_argument("--warmup", type=positive, default=5, metavar="N", help="steps before those (default: 5)")
    parser.add_argument(
        "--workers", type=int, choices=(1, 2, 4, 8), default=1, help="data-parallel ranks, one thread each (default: 1)"
    )
    parser.add_argument(
        "--micro-batch-size",
        type=int,
        choices=(1, 2, 4, 8),
        help="pairs of a forward pass; a step has 8 over all workers (default: all of a worker's)",
    )
    parser.add_argument(
        "--reference-logprobs",
        choices=("in_step", "precompute"),
        default="in_step",
        help="when the reference measures (default: in_step)",
    )
    parser.add_argument(
        "--layer-spec",
        choices=("auto", "local"),
        default="auto",
        help="auto: the fastest modules there are; local: Megatron-Core's own (default: auto)",
    )
    options = parser.parse_args(arguments)
    options.micro_batch_size = options.micro_batch_size or NUM_PAIRS // options.workers
    if NUM_PAIRS % (options.micro_batch_size * options.workers):
        parser.error(
            f"--micro-batch-size {options.micro_batch_size} x --workers {options.workers} does not divide the"
            f" {NUM_PAIRS} pairs of a step; nearest: --micro-batch-size {NUM_PAIRS // options.workers}"
        )
    return options


def make_config(model: Path, options: argparse.Namespace) -> DPOMasterConfig:
    """The demo's configuration with this benchmark's sizes."""
    values: dict[str, Any] = {
        "dpo.max_num_epochs": 1,
        "dpo.max_num_steps": "null",
        "dpo.val_period": 0,
        "dpo.val_at_start": False,
        "dpo.val_at_end": False,
        "dpo.reference_logprobs": options.reference_logprobs,
        "checkpointing.enabled": False,
        "policy.model_name": model,
        "policy.init": "random",
        "policy.tokenizer.name": REPOSITORY / "examples" / "assets" / "tiny_qwen3_moe",
        "policy.train_global_batch_size": NUM_PAIRS,
        "policy.train_micro_batch_size": options.micro_batch_size,
        "policy.max_total_sequence_length": SEQUENCE_LENGTH,
        "policy.megatron_cfg.layer_spec": options.layer_spec,
        "policy.megatron_cfg.optimizer.lr": 1e-4,
        "policy.megatron_cfg.optimizer.min_lr": 1e-4,
        "policy.megatron_cfg.scheduler.lr_decay_style": "constant",
        "policy.megatron_cfg.scheduler.lr_warmup_iters": 0,
        "data.validation": "null",
        "cluster.cpu_workers_per_node": options.workers,
    }
    overrides = [f"{key}={value}" for key, value in values.items()]
    return load_dpo_config(REPOSITORY / "examples" / "configs" / "dpo_tiny_moe.yaml", overrides, check_paths=False)


def random_pairs(num_steps: int) -> PreferenceDataset:
    """Pairs of random tokens that share their prompt."""
    count, generator = num_steps * NUM_PAIRS, np.random.default_rng(0)
    tokens = generator.integers(VOCABULARY, size=(count, 2, SEQUENCE_LENGTH), dtype=np.int32)
    tokens[:, 1, :PROMPT_LENGTH] = tokens[:, 0, :PROMPT_LENGTH]
    is_response = np.arange(SEQUENCE_LENGTH) >= PROMPT_LENGTH
    examples = [
        TokenizedExample(sequence, is_response, truncated=False, sample_id=f"random:{index}")
        for index, pair in enumerate(tokens)
        for sequence in pair
    ]
    report = DataReport("random", WORDS, count, tokens.size, int(is_response.sum()) * 2 * count)
    return PreferenceDataset(TokenStore(examples), report)


def run(
    config: DPOMasterConfig,
    data: PreferenceDataset,
    folder: Path,
    clock: StepClock,
    stack: ExitStack,
    cores: set[int],
) -> None:
    """Trains in the product's own loop."""
    pairs = Pairs(config, pad_token_id=0, training=data, validation=None)
    num_steps = len(pairs.loader())
    in_step = config.dpo.reference_logprobs == "in_step"
    cluster = RayCluster(config.cluster)
    stack.callback(cluster.shutdown)
    policy = MegatronPolicy(
        config,
        cluster,
        seed=config.dpo.seed,
        num_steps=num_steps,
        source=find_model(config.policy),
        model_files={},
        keep_reference=in_step,
    )
    stack.callback(policy.shutdown)
    release(cores)
    loggers, console = open_loggers(folder, clock, stack)
    if not in_step:
        pairs = pairs.measured(policy, range(num_steps), console)
    sinks = RecordSinks(loggers, ArtifactTables(folder, console.warn).write)
    recorder = StepRecorder(sinks, None, lambda: None, config.policy.max_consecutive_skipped_updates, LoopState())
    train_dpo(config.dpo, policy, pairs.loader(), None, recorder)
    clock.cpu_seconds.append(family_cpu_seconds())


def summary(clock: StepClock) -> dict[str, Any]:
    """Speeds over all measured steps."""
    steps = clock.steps[clock.warmup :]
    seconds = [step["seconds"] for step in steps]
    median, best = statistics.median(seconds), min(seconds)
    before, after = clock.cpu_seconds
    return {
        "tokens_per_second": {
            "median": round(TOKENS_PER_STEP / median, 1),
            "best": round(TOKENS_PER_STEP / best, 1),
        },
        "seconds_per_step": {"median": round(median, 5), "best": round(best, 5)},
        "tokens_per_cpu_second": round(TOKENS_PER_STEP * len(steps) / (after - before), 1),
        "reference_share": round(sum(step.get(REFERENCE_PHASE, 0.0) for step in steps) / sum(seconds), 4),
        "last_loss": steps[-1]["train/loss"],
        "last_accuracy": steps[-1]["train/accuracy"],
    }


if __name__ == "__main__":
    main()
