# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Time for which saving the policy blocks training, and total time of saving. Prints one JSON line.

Ray workers with Megatron-Core and its optimizer train a small Qwen3-MoE. In each round they begin a checkpoint of
weights, optimizer and random states, continue to train while they write it, then take some steps without one. The few
kilobytes that a run adds, and the final renaming of the folder, are excluded.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from small_model import VOCABULARY, make_parser, overrides_of, positive, running_ray, start_policy, write_model

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.config.loading import load_config
from nemo_rl_moe.config.schema import SFTMasterConfig
from nemo_rl_moe.data.chat import TokenizedExample
from nemo_rl_moe.data.loader import collate
from nemo_rl_moe.distributed.batch import TokenBatch
from nemo_rl_moe.distributed.cluster import RayCluster
from nemo_rl_moe.models.policy.lm_policy import MegatronPolicy
from nemo_rl_moe.runs.folder.folder import collect_versions

BATCH_SIZE, SEQUENCE_LENGTH, STEPS_BETWEEN = 8, 128, 5
EXAMPLES = """\
examples:
  python benchmarks/checkpoint_saving.py                     two workers
  python benchmarks/checkpoint_saving.py --workers 1 --hidden-size 512

blocking_seconds is how long training waits for the beginning: the snapshot, and the planning of who writes what.
write_seconds is from the beginning to the end of the first step at which every file is known to be written and flushed
to the disk (fsync) and the index to be complete, so it is a whole number of steps. step_ratio is the median step while
a checkpoint is being written, divided by the median step without one. Files go to the folder for temporary files: set
TMPDIR to measure another disk."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__, EXAMPLES)
    parser.add_argument("--workers", type=positive, default=2, help="data-parallel workers (default: 2)")
    parser.add_argument("--rounds", type=positive, default=5, help="checkpoints to save (default: 5)")
    parser.add_argument("--hidden-size", type=positive, default=128, help="the model's width (default: 128)")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        num_parameters = write_model(folder / "model", hidden_size=options.hidden_size)
        stack.enter_context(running_ray(options.workers))
        config = make_config(folder / "model", options.workers)
        policy = start_policy(config, RayCluster(config.cluster), stack, seed=0, num_steps=1000)
        result = measure(policy, folder, options.rounds)
    print(
        json.dumps(
            {"benchmark": "checkpoint_saving", "parameters": num_parameters, "workers": options.workers}
            | result
            | {"versions": collect_versions()["packages"]["megatron-core"]}
        )
    )


def measure(policy: MegatronPolicy, folder: Path, num_rounds: int) -> dict[str, Any]:
    """Save in every round, and measure the effect on training."""
    batch = random_batch()
    for _ in range(STEPS_BETWEEN):
        policy.train(batch, sft_loss)
    blocking, writing, with_one, without = [], [], [], []
    size = 0
    for number in range(num_rounds):
        directory = folder / f"round_{number}"
        directory.mkdir()
        began = time.perf_counter()
        policy.start_checkpoint(directory, with_optimizer=True)
        blocking.append(time.perf_counter() - began)
        problems = None
        while problems is None:
            with_one.append(seconds_of(lambda: policy.train(batch, sft_loss)))
            problems = policy.poll_checkpoint(wait=False)
        writing.append(time.perf_counter() - began)
        assert not problems, problems
        size = sum(path.stat().st_size for path in directory.iterdir())
        without += [seconds_of(lambda: policy.train(batch, sft_loss)) for _ in range(STEPS_BETWEEN)]
    return {
        "checkpoint_megabytes": round(size / 1e6, 1),
        "blocking_seconds": {"median": round(statistics.median(blocking), 4), "max": round(max(blocking), 4)},
        "write_seconds": {"median": round(statistics.median(writing), 4), "max": round(max(writing), 4)},
        "step_seconds": round(statistics.median(without), 4),
        "step_ratio": round(statistics.median(with_one) / statistics.median(without), 3),
    }


def seconds_of(action: Callable[[], Any]) -> float:
    """Return the wall-clock seconds of an action."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def random_batch() -> TokenBatch:
    """Return one global batch of full rows."""
    generator = np.random.default_rng(0)
    rows = generator.integers(1, VOCABULARY, (BATCH_SIZE, SEQUENCE_LENGTH), dtype=np.int32)
    mask = np.ones(SEQUENCE_LENGTH, dtype=np.bool_)
    return collate([TokenizedExample(row, mask, False, str(number)) for number, row in enumerate(rows)], 0)


def make_config(model: Path, num_workers: int) -> SFTMasterConfig:
    """Return the demo's configuration with this benchmark's sizes."""
    values: dict[str, Any] = {
        "policy.model_name": model,
        "policy.train_global_batch_size": BATCH_SIZE,
        "policy.train_micro_batch_size": BATCH_SIZE // num_workers,
        "policy.max_total_sequence_length": SEQUENCE_LENGTH,
        "cluster.cpu_workers_per_node": num_workers,
    }
    return load_config("sft_tiny_moe.yaml", overrides_of(values), check_paths=False)


if __name__ == "__main__":
    main()
