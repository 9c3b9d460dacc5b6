# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of direct preference optimization on CPU cores. Prints one JSON line.

This runs the real trainer (Ray workers, Megatron-Core, the data loader, the training loop with MoE metrics, and the
loggers) on a small Qwen3-MoE (4 layers, 8 experts, top 2) with random weights. A step has 8 pairs, as 16 sequences of
exactly 128 tokens: 32 of the pair's prompt and 96 of each response. With the reference in the step, it is one forward
pass of the reference, then a forward and a backward pass and an update of the policy. Tokens count once.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
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
    make_parser,
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

from nemo_rl_moe.algorithms.dpo import train_dpo
from nemo_rl_moe.algorithms.step_recorder import RecordSinks
from nemo_rl_moe.config.loading import load_dpo_config
from nemo_rl_moe.config.schema import DPOMasterConfig
from nemo_rl_moe.data.chat import TokenizedExample
from nemo_rl_moe.data.dataset import DataReport
from nemo_rl_moe.data.loader import TokenStore
from nemo_rl_moe.data.preferences import WORDS, PreferenceDataset
from nemo_rl_moe.distributed.cluster import RayCluster
from nemo_rl_moe.distributed.node_tools import threads_per_worker, usable_cores
from nemo_rl_moe.launch.dpo import with_reference_sums
from nemo_rl_moe.launch.pairs import Pairs
from nemo_rl_moe.runs.loggers.artifacts import ArtifactTables

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


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    cores = confine(options.workers)
    clock = StepClock(counts_cpu_at=(options.warmup, options.warmup + options.steps))
    with tempfile.TemporaryDirectory(prefix="dpo_throughput_") as scratch, ExitStack() as stack:
        folder = Path(scratch)
        num_parameters = write_model(folder / "model")
        stack.enter_context(running_ray(options.workers))
        threads = threads_per_worker(usable_cores(), options.workers)
        config = make_config(folder / "model", options)
        run(config, random_pairs(options.warmup + options.steps), folder, clock, stack, cores)
    result = summary(clock, options.warmup) | {
        "tokens_per_step": TOKENS_PER_STEP,
        "steps": options.steps,
        "workers": options.workers,
        "threads_per_worker": threads,
        "micro_batch_size": options.micro_batch_size,
        "reference_logprobs": options.reference_logprobs,
        "layer_spec": options.layer_spec,
        "model": MODEL | {"num_parameters": num_parameters, "precision": "float32"},
        **surroundings(),
    }
    print(json.dumps({"name": "dpo_throughput"} | result))


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, EXAMPLES)
    parser.add_argument("--steps", type=positive, default=40, metavar="N", help="measured steps (default: 40)")
    parser.add_argument("--warmup", type=positive, default=5, metavar="N", help="steps before these (default: 5)")
    add_workers(parser)
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
    add_layer_spec(parser)
    options = parser.parse_args(arguments)
    options.micro_batch_size = options.micro_batch_size or NUM_PAIRS // options.workers
    require_whole_microbatches(parser, options, NUM_PAIRS, "pairs")
    return options


def make_config(model: Path, options: argparse.Namespace) -> DPOMasterConfig:
    """Return the demo's configuration with this benchmark's sizes."""
    values: dict[str, Any] = {
        **one_epoch("dpo"),
        "dpo.reference_logprobs": options.reference_logprobs,
        "policy.model_name": model,
        "policy.init": "random",
        "policy.tokenizer.name": TOKENIZER,
        "policy.train_global_batch_size": NUM_PAIRS,
        "policy.train_micro_batch_size": options.micro_batch_size,
        "policy.max_total_sequence_length": SEQUENCE_LENGTH,
        "policy.megatron_cfg.layer_spec": options.layer_spec,
        **CONSTANT_RATE,
        "cluster.cpu_workers_per_node": options.workers,
    }
    return load_dpo_config(CONFIGS / "dpo_tiny_moe.yaml", overrides_of(values), check_paths=False)


def random_pairs(num_steps: int) -> PreferenceDataset:
    """Return pairs of random tokens with a common prompt."""
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
    """Train in the package's loop."""
    pairs = Pairs(config, config.dpo, pad_token_id=0, training=data, validation=None)
    num_steps = len(pairs.loader())
    in_step = config.dpo.reference_logprobs == "in_step"
    cluster = RayCluster(config.cluster)
    policy = start_policy(config, cluster, stack, seed=config.dpo.seed, num_steps=num_steps, keep_reference=in_step)
    release(cores)
    loggers, console = open_loggers(folder, clock, stack)
    if not in_step:
        pairs = with_reference_sums(pairs, policy, range(num_steps), console)
    sinks = RecordSinks(loggers, ArtifactTables(folder, console.warn).write)
    train_dpo(config.dpo, policy, pairs.loader(), None, recorder_without_checkpoints(config.policy, sinks))


def summary(clock: StepClock, warmup: int) -> dict[str, Any]:
    """Return the speeds over all measured steps."""
    steps = clock.steps[warmup:]
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
