# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Mixed lengths: plain, dynamic and packed microbatches in turns, by the real trainer. Prints one JSON line.

Supervised fine-tuning as in `sft_throughput.py`, with 16 sequences of lognormal length (median 80, at most 500) per
step. Each way to fill microbatches has a separate worker. All train the same batches in turns.
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
from sft_throughput import Contestant, median_ratio, start_contestant
from small_model import (
    CONFIGS,
    CONSTANT_RATE,
    MODEL,
    TOKENIZER,
    VOCABULARY,
    confine,
    make_parser,
    not_negative,
    one_epoch,
    overrides_of,
    positive,
    release,
    running_ray,
    surroundings,
    write_model,
)

from nemo_rl_moe.config.loading import load_config
from nemo_rl_moe.config.schema import SFTMasterConfig
from nemo_rl_moe.data.chat import TokenizedExample
from nemo_rl_moe.data.loader import GlobalBatchLoader
from nemo_rl_moe.distributed.microbatches import PackedBatching, plan_microbatches
from nemo_rl_moe.models.policy.model_workers import choose_batching

BATCH_SIZE, MICRO_BATCH_SIZE, LONGEST, MEDIAN, BUDGET = 16, 4, 500, 80, 2048
DYNAMIC = {"policy.dynamic_batching.enabled": True, "policy.dynamic_batching.train_mb_tokens": BUDGET}
PACKING = {"policy.sequence_packing.enabled": True, "policy.sequence_packing.train_mb_tokens": BUDGET}
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "dynamic_fewest_microbatches": DYNAMIC | {"policy.dynamic_batching.microbatch_overhead_tokens": 1_000_000},
    "dynamic": DYNAMIC,
    "packing": PACKING,
}
PADDED = ("plain", "dynamic_fewest_microbatches", "dynamic")
EXAMPLES = """\
examples:
  python benchmarks/mixed_lengths.py
  taskset -c 0 python benchmarks/mixed_lengths.py            driver, Ray and workers on one core

to_plain is the speed in real tokens a second divided by that of plain microbatches of 4, the median over turns;
computed_to_real counts padding. overhead_tokens is a least squares fit of the CPU seconds of the padded modes to the
tokens that they compute and to their microbatches: in the time of one more microbatch so many tokens could be computed,
what policy.dynamic_batching.microbatch_overhead_tokens is about."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    cores = confine(1)
    with tempfile.TemporaryDirectory(prefix="mixed_lengths_") as scratch, ExitStack() as stack:
        folder = Path(scratch)
        write_model(folder / "model")
        stack.enter_context(running_ray(len(MODES)))
        num_steps = options.warmup + options.turns * options.block
        contestants = {
            mode: start_contestant(make_config(folder / "model", changes), num_steps, folder / mode, stack)
            for mode, changes in MODES.items()
        }
        release(cores)
        if options.warmup:
            for contestant in contestants.values():
                contestant.train(batches(options.warmup, seed=0), measured=False)
        for turn in range(1, options.turns + 1):
            order = list(contestants.values())
            for contestant in order if turn % 2 else reversed(order):
                contestant.train(batches(options.block, seed=turn), measured=True)
    lengths = [lengths_of(options.block, seed=turn) for turn in range(1, options.turns + 1)]
    print(json.dumps(result(contestants, [length for block in lengths for length in block], options)))


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, EXAMPLES)
    parser.add_argument("--turns", type=positive, default=6, metavar="N", help="turns of each mode (default: 6)")
    parser.add_argument("--block", type=positive, default=5, metavar="N", help="steps of one turn (default: 5)")
    parser.add_argument("--warmup", type=not_negative, default=2, metavar="N", help="steps before these (default: 2)")
    return parser.parse_args(arguments)


def make_config(model: Path, changes: dict[str, Any]) -> SFTMasterConfig:
    """Return the demo's configuration with this benchmark's sizes."""
    values: dict[str, Any] = {
        **one_epoch("sft"),
        "policy.model_name": model,
        "policy.tokenizer.name": TOKENIZER,
        "policy.train_global_batch_size": BATCH_SIZE,
        "policy.train_micro_batch_size": MICRO_BATCH_SIZE,
        "policy.max_total_sequence_length": LONGEST,
        **CONSTANT_RATE,
        "cluster.cpu_workers_per_node": 1,
    }
    return load_config(CONFIGS / "sft_tiny_moe.yaml", overrides_of(values | changes), check_paths=False)


def lengths_of(num_batches: int, seed: int) -> list[int]:
    """Sample the number of tokens of each sequence."""
    sampled = np.random.default_rng(seed).normal(np.log(MEDIAN), 0.9, num_batches * BATCH_SIZE)
    return [int(length) for length in np.exp(sampled).clip(8, LONGEST)]


def batches(num_batches: int, seed: int) -> GlobalBatchLoader:
    """Return sequences of random tokens, all of which are trained on."""
    generator = np.random.default_rng(seed)
    examples = [
        TokenizedExample(
            generator.integers(VOCABULARY, size=length, dtype=np.int32),
            np.ones(length, dtype=np.bool_),
            truncated=False,
            sample_id=f"random:{index}",
        )
        for index, length in enumerate(lengths_of(num_batches, seed))
    ]
    return GlobalBatchLoader(examples, BATCH_SIZE, pad_token_id=0, seed=seed, shuffle=False)


def computed_tokens(config: SFTMasterConfig, lengths: Sequence[int]) -> tuple[int, int]:
    """Return the numbers of tokens with padding and of microbatches, in global batches in the order of `lengths`."""
    batching = choose_batching(config.policy, MICRO_BATCH_SIZE)
    plan = plan_microbatches(lengths, num_data_parallel_ranks=1, global_batch_size=BATCH_SIZE, batching=batching)
    tokens = 0
    for (microbatches,) in plan.global_batches:
        for members in ([lengths[index] for index in microbatch] for microbatch in microbatches):
            tokens += sum(members) if isinstance(batching, PackedBatching) else len(members) * max(members)
    return tokens, sum(plan.num_microbatches)


def result(contestants: dict[str, Contestant], lengths: Sequence[int], options: argparse.Namespace) -> dict[str, Any]:
    """Return the speeds, padding and the fit."""
    counts = {mode: computed_tokens(contestant.config, lengths) for mode, contestant in contestants.items()}
    steps, plain = options.turns * options.block, contestants["plain"]
    modes = {}
    for mode, contestant in contestants.items():
        tokens, microbatches = counts[mode]
        seconds = [each for block in contestant.blocks for each in block]
        modes[mode] = {
            "tokens_per_second": round(sum(lengths) / steps / statistics.fmean(seconds), 1),
            "tokens_per_cpu_second": round(sum(lengths) / contestant.cpu_seconds, 1),
            "to_plain": round(median_ratio(plain.blocks, contestant.blocks), 3),
            "to_plain_by_cpu_seconds": round(plain.cpu_seconds / contestant.cpu_seconds, 3),
            "computed_to_real": round(tokens / sum(lengths), 3),
            "microbatches_per_step": round(microbatches / steps, 2),
        }
    # Seconds per step, per token and per microbatch. The seconds per step are the same in all modes.
    table = np.array([[*counts[mode], steps] for mode in PADDED], dtype=np.float64)
    of_token, of_microbatch, _ = np.linalg.solve(table, [contestants[mode].cpu_seconds for mode in PADDED])
    return {
        "name": "mixed_lengths",
        "modes": modes,
        "overhead_tokens": round(float(of_microbatch / of_token), 1),
        "last_losses": {mode: contestant.losses[-1] for mode, contestant in contestants.items()},
        "steps": steps,
        "sequences_per_step": BATCH_SIZE,
        "max_microbatch_tokens": BUDGET,
        "model": MODEL,
        **surroundings(),
    }


if __name__ == "__main__":
    main()
