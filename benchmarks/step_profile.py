# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""CPU time of a training step on a CPU, by kind of operation. Prints one JSON line.

Steps of `sft_throughput.py` (8 sequences of 128 tokens, a small Qwen3-MoE) by the real trainer in this process, without
the driver, Ray and the loggers. `trainer_cpu_ms` is measured without the profiler. The shares exclude the profiler's
cost as far as it knows it. `elsewhere` is Python and the dispatch of PyTorch's operations.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from sft_throughput import BATCH_SIZE, make_config, random_batches
from small_model import confine, one_rank, positive, write_model
from torch.profiler import ProfilerActivity, profile

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.distributed.batch import TokenBatch, make_shard
from nemo_rl_moe.models.hf_files import load_hf_config
from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer
from nemo_rl_moe.runs.folder.folder import collect_versions

KINDS = {
    "matrix_products": ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm"),
    "softmax": ("_softmax", "_softmax_backward_data", "_log_softmax"),
    "copies": (
        "copy_",
        "cat",
        "clone",
        "fill_",
        "zero_",
        "index_select",
        "index_add_",
        "index_copy_",
        "gather",
        "scatter_",
    ),
    "optimizer": ("_fused_adamw_",),
    "views": (
        "view",
        "slice",
        "select",
        "as_strided",
        "empty",
        "empty_strided",
        "reshape",
        "transpose",
        "permute",
        "expand",
    ),
}
"""Operations by kind. Other operations of PyTorch are elementwise ones and sums."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=positive, default=20, metavar="N", help="steps of each kind (default: 20)")
    parser.add_argument(
        "--micro-batch-size", type=int, choices=(1, 2, 4, 8), default=4, help="sequences of a forward pass (default: 4)"
    )
    options = parser.parse_args(arguments, argparse.Namespace(layer_spec="auto", workers=1))
    confine(1)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="step_profile_") as scratch:
        write_model(Path(scratch, "model"))
        config = make_config(Path(scratch, "model"), options, track_moe_metrics=True)
        with one_rank(config.policy):
            trainer = MegatronTrainer(config.policy, load_hf_config(config.policy.model_name), None, num_steps=1000)
            batches = list(random_batches(3 + 2 * options.steps, seed=0).epoch(0))
            result = measure(trainer, batches, options.micro_batch_size)
    print(json.dumps({"name": "step_profile", **result, "steps": options.steps, "versions": collect_versions()}))


def measure(trainer: MegatronTrainer, batches: Sequence[TokenBatch], size: int) -> dict[str, object]:
    """Return the CPU time of a step, and the share of each kind of operation."""

    def train(batch: TokenBatch) -> float:
        start = time.process_time()
        microbatches = [range(first, first + size) for first in range(0, BATCH_SIZE, size)]
        trainer.train([make_shard(batch, microbatches, batch)], sft_loss)
        return time.process_time() - start

    for batch in batches[:3]:
        train(batch)
    half = len(batches[3:]) // 2
    plain = [train(batch) for batch in batches[3 : 3 + half]]
    with profile(activities=[ProfilerActivity.CPU]) as found:
        for batch in batches[3 + half :]:
            train(batch)
    spent: Counter[str] = Counter()
    for event in found.key_averages():
        spent[_kind(event.key)] += event.self_cpu_time_total
    total = sum(spent.values())
    shares = {kind: round(microseconds / total, 3) for kind, microseconds in spent.most_common()}
    return {"trainer_cpu_ms": round(1e3 * statistics.median(plain), 2), "shares": shares}


def _kind(operation: str) -> str:
    if not operation.startswith("aten::"):
        return "elsewhere"
    name = operation.removeprefix("aten::")
    return next((kind for kind, names in KINDS.items() if name in names), "elementwise_and_sums")


if __name__ == "__main__":
    main()
