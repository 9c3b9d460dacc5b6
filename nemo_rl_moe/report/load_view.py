# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What a page shows of the load of every expert, beside the loads themselves."""

from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import NDArray

from nemo_rl_moe.moe.load_arrays import (
    coefficient_of_variation,
    dead,
    excess_coefficient_of_variation,
    overload_of_steps,
    utilization,
)
from nemo_rl_moe.report.arrays import ArrayPool
from nemo_rl_moe.run_folder.run_data import ExpertLoadHistory
from nemo_rl_moe.run_folder.samples import evenly_spaced, highest_of_stretches

OUTLIERS_OF_A_KIND = 5
MOST_COLUMNS, MOST_POINTS = 300, 400
_FEWEST = 10
_STEPS_AT_A_TIME = 64
_BYTES_OF_A_CELL, _BYTES_OF_A_POINT = 6, 4


def load_view(
    load: ExpertLoadHistory, topk: int | None, own_size: int, pool: ArrayPool, share: float = 1.0
) -> dict[str, Any]:
    """Everything but the loads.

    Args:
        load: The loads.
        topk: Experts that a token goes to; None where that is not known: the spread then is what it is, by chance too.
        own_size: The run's own expert-parallel size.
        pool: Takes the arrays.
        share: Of the points and columns over time that there is space for.

    Returns:
        `layers`, `num_experts`, `num_steps`; `by_layer`: spread and dead experts of layers x steps, of each stretch of
        steps the highest; `outliers`: utilization over time of the most and the least loaded experts; `what_if`: the
        overload that expert-parallel sizes would have.
    """
    points = _part(MOST_POINTS, share)
    return {
        "layers": load.layers.tolist(),
        "num_experts": load.num_experts,
        "num_steps": len(load.steps),
        "by_layer": _by_layer(load, topk, pool, _part(MOST_COLUMNS, share)),
        "outliers": _outliers(load, pool, points),
        "what_if": _what_if(load, own_size, pool, points),
    }


def view_bytes(load: ExpertLoadHistory) -> int:
    """About as many bytes as the arrays of `load_view` take, before they are compressed."""
    columns, points = (min(len(load.steps), most) for most in (MOST_COLUMNS, MOST_POINTS))
    num_lines = 2 * OUTLIERS_OF_A_KIND + len(expert_parallel_sizes(load.num_experts))
    return columns * len(load.layers) * _BYTES_OF_A_CELL + points * num_lines * _BYTES_OF_A_POINT


def outlier_experts(load: ExpertLoadHistory) -> dict[str, list[tuple[int, int]]]:
    """The most and the least loaded experts of the last tenth of the steps, as rows of layers and experts."""
    mean = utilization(load.counts[-max(len(load.steps) // 10, 1) :]).mean(0)
    order = np.argsort(mean, axis=None, kind="stable")
    number = min(OUTLIERS_OF_A_KIND, len(order) // 2)
    chosen = {"most": order[::-1][:number], "least": order[:number]}
    return {
        which: [(int(position) // load.num_experts, int(position) % load.num_experts) for position in positions]
        for which, positions in chosen.items()
    }


def expert_parallel_sizes(num_experts: int) -> list[int]:
    """All sizes above 1 that the experts can be dealt out to evenly."""
    return [size for size in range(2, num_experts + 1) if num_experts % size == 0]


def _part(most: int, share: float) -> int:
    return max(int(most * min(share, 1.0)), _FEWEST)


def _by_layer(load: ExpertLoadHistory, topk: int | None, pool: ArrayPool, columns: int) -> dict[str, Any]:
    def spread(counts: Int[np.ndarray, "steps layers experts"]) -> Float[np.ndarray, "steps layers"]:
        return coefficient_of_variation(counts) if topk is None else excess_coefficient_of_variation(counts, topk)

    last, highest = highest_of_stretches(_in_parts(spread, load.counts), columns)
    _, most_dead = highest_of_stretches(_in_parts(lambda counts: dead(counts).sum(-1), load.counts), columns)
    return {
        "steps": pool.add(load.steps[last].astype(np.int32)),
        "steps_of_a_column": -(-len(load.steps) // len(last)),
        "is_beyond_chance": topk is not None,
        "spread": pool.add(highest.astype(np.float32)),
        "dead": pool.add(most_dead.astype(np.uint16)),
    }


def _outliers(load: ExpertLoadHistory, pool: ArrayPool, points: int) -> dict[str, Any]:
    chosen = evenly_spaced(len(load.steps), points)
    shares = utilization(load.counts[chosen])
    experts = [
        {
            "which": which,
            "layer": int(load.layers[row]),
            "expert": expert,
            "values": pool.add(shares[:, row, expert].astype(np.float32)),
        }
        for which, positions in outlier_experts(load).items()
        for row, expert in positions
    ]
    return {"steps": pool.add(load.steps[chosen].astype(np.int32)), "experts": experts}


def _what_if(load: ExpertLoadHistory, own_size: int, pool: ArrayPool, points: int) -> dict[str, Any]:
    chosen = evenly_spaced(len(load.steps), points)
    late = slice(-max(len(load.steps) // 10, 1), None)
    sizes = []
    for size in expert_parallel_sizes(load.num_experts):
        overload = _in_parts(lambda counts, size=size: overload_of_steps(counts, size), load.counts)  # type: ignore[misc]
        sizes.append(
            {
                "size": size,
                "values": pool.add(overload[chosen].mean(1).astype(np.float32)),
                "late_mean": float(overload[late].mean()),
                "late_worst_layer": float(overload[late].mean(0).max()),
                "late_worst_layer_index": int(load.layers[overload[late].mean(0).argmax()]),
            }
        )
    return {"own_size": own_size, "steps": pool.add(load.steps[chosen].astype(np.int32)), "sizes": sizes}


def _in_parts(function: Callable[[NDArray[Any]], NDArray[Any]], counts: NDArray[Any]) -> NDArray[Any]:
    """Of all steps, without the memory that all steps at once would take."""
    starts = range(0, len(counts), _STEPS_AT_A_TIME)
    return np.concatenate([function(counts[start : start + _STEPS_AT_A_TIME]) for start in starts])
