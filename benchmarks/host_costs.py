# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""CPU time of the driver's work: planning, reading data, alerts, loading the routing functions.

Prints one JSON line. Each figure is the best of several repetitions, since other processes disturb them, in seconds of
one core.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from small_model import CONFIGS, TOKENIZER, positive
from transformers import AutoTokenizer

from nemo_rl_moe.config.loading import load_config
from nemo_rl_moe.data.sft import load_sft_dataset
from nemo_rl_moe.distributed.microbatches import (
    Batching,
    DynamicBatching,
    PackedBatching,
    PlainBatching,
    plan_microbatches,
)
from nemo_rl_moe.runs.loggers.alerts import AlertWatch

SEQUENCES, RANKS, LONGEST = 4096, 8, 2048
EXAMPLES, MEGABYTE = 3000, 1_000_000
LAYERS, EXPERTS, TOPK = 48, 128, 8
LOADING = """
import time, torch
started = time.process_time()
import nemo_rl_moe.routing.metrics.load_balance_metrics, nemo_rl_moe.routing.findings.tracker
import nemo_rl_moe.routing.metrics.mismatch_split
print(time.process_time() - started)
"""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=positive, default=5, help="repetitions of each (default: 5)")
    repetitions = parser.parse_args(arguments).repetitions

    def best(function: Callable[[], object]) -> float:
        return round(min(_seconds(function) for _ in range(repetitions)), 5)

    with tempfile.TemporaryDirectory() as folder:
        seconds = {
            **{f"plan_{name}": best(partial(_plan, batching)) for name, batching in BATCHING.items()},
            f"read_{EXAMPLES}_examples": best(_reading(Path(folder) / "short.jsonl", EXAMPLES * ["1+1="])),
            "read_a_line_of_a_megabyte": best(_reading(Path(folder) / "long.jsonl", ["1+1=", "1" * MEGABYTE])),
            "watch_a_step": best(_watching()),
            "load_the_routing_functions": min(_loading_seconds() for _ in range(repetitions)),
        }
    print(json.dumps({"name": "host_costs", "sequences": SEQUENCES, "cpu_seconds": seconds}))


BATCHING: dict[str, Batching] = {
    "plain": PlainBatching(4),
    "dynamic": DynamicBatching(4096, 128),
    "packed": PackedBatching(4096, 8),
}


def _seconds(function: Callable[[], object]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def _plan(batching: Batching) -> None:
    generator = random.Random(0)
    lengths = [generator.randint(1, LONGEST) for _ in range(SEQUENCES)]
    plan_microbatches(lengths, num_data_parallel_ranks=RANKS, global_batch_size=SEQUENCES, batching=batching)


def _reading(path: Path, prompts: Sequence[str]) -> Callable[[], object]:
    path.write_text("".join(json.dumps({"prompt": prompt, "completion": "2"}) + "\n" for prompt in prompts))
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    return lambda: load_sft_dataset(str(path), "train", tokenizer, 64)


def _watching() -> Callable[[], object]:
    config = load_config(CONFIGS / "sft_tiny_moe.yaml", check_paths=False)
    watch = AlertWatch(config.logger.alerts, TOPK)
    counts = np.random.default_rng(0).multinomial(262_144, np.full(EXPERTS, 1 / EXPERTS), size=LAYERS)
    metrics = {f"train/moe/metric_{number}": 1.0 for number in range(60)}
    steps = iter(range(1, 1_000_000))
    return lambda: watch.observe(next(steps), metrics, range(LAYERS), counts)


def _loading_seconds() -> float:
    done = subprocess.run([sys.executable, "-c", LOADING], capture_output=True, text=True, check=True)
    return round(float(done.stdout), 5)


if __name__ == "__main__":
    main()
