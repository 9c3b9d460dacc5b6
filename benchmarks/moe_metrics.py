# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""How long the load balance metrics of one step take on one CPU thread. Prints one JSON line."""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from nemo_rl_moe.routing.metrics.load_balance_metrics import (
    compute_brief_metrics,
    compute_detailed_metrics,
    load_balance_metrics,
)
from nemo_rl_moe.routing.metrics.load_statistics import ExpertLoad, LayerLoad

Input = TypeVar("Input")

NUM_LAYERS = 61
NUM_EXPERTS = (64, 128, 256, 512, 1024)
ROUTER_TOPK = 8
# Different matrices in turn: on one alone the branch predictor learns the data by heart.
NUM_MATRICES = 50


def random_counts(num_experts: int, seed: int) -> Tensor:
    """Count `[NUM_LAYERS, num_experts]` of uneven experts: about 400 assignments each, cv about 0.5."""
    generator = torch.Generator().manual_seed(seed)
    popularity = torch.rand(NUM_LAYERS, num_experts, generator=generator, dtype=torch.float64).add(0.1).square()
    return torch.poisson(popularity * 900, generator=generator).long()


def median_ms(function: Callable[[Input], object], inputs: list[Input], repeats: int) -> dict[str, float]:
    """Return the median time of a call: `wall`, and `cpu`, which other programs on the machine disturb less."""
    wall, cpu = [], []
    for repeat in range(-5, repeats):
        one_input = inputs[repeat % len(inputs)]
        wall_start, cpu_start = time.perf_counter(), time.thread_time()
        function(one_input)
        if repeat >= 0:
            cpu.append(time.thread_time() - cpu_start)
            wall.append(time.perf_counter() - wall_start)
    return {
        "wall_ms": round(1e3 * statistics.median(wall), 4),
        "cpu_ms": round(1e3 * statistics.median(cpu), 4),
        "wall_min_ms": round(1e3 * min(wall), 4),
    }


def as_layer_loads(counts_LE: Tensor) -> dict[int, LayerLoad]:
    """Return the counts as the public functions take them."""
    num_experts = counts_LE.shape[1]
    return {
        layer: {"expert_load": row, "aux_loss": None, "n_experts": num_experts, "topk": ROUTER_TOPK}
        for layer, row in enumerate(counts_LE)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=300, help="timed calls of each function (default: 300)")
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)

    def detailed(counts_LE: Tensor) -> object:
        losses = [1.0] * NUM_LAYERS
        load = ExpertLoad(tuple(range(NUM_LAYERS)), counts_LE)
        return load_balance_metrics(load, router_topk=ROUTER_TOPK, aux_losses=losses, detailed=True)

    by_experts = {}
    for num_experts in NUM_EXPERTS:
        matrices = [random_counts(num_experts, seed) for seed in range(NUM_MATRICES)]
        by_experts[str(num_experts)] = median_ms(detailed, matrices, repeats)
        if num_experts == 256:
            mappings = [as_layer_loads(matrix) for matrix in matrices]
            detailed_mapping = median_ms(compute_detailed_metrics, mappings, repeats)
            brief_mapping = median_ms(compute_brief_metrics, mappings, repeats)
    result = {
        "benchmark": "moe_metrics",
        "layers": NUM_LAYERS,
        "threads": torch.get_num_threads(),
        "repeats": repeats,
        "torch": torch.__version__,
        "detailed_61x256": by_experts["256"],
        "detailed_61x256_from_mapping": detailed_mapping,
        "brief_61x256_from_mapping": brief_mapping,
        "detailed_by_experts": by_experts,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
