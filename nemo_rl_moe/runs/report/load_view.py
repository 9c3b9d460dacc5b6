# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Data of a report about the expert load: layers over time, outliers, other expert-parallel sizes, image tokens."""

from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from nemo_rl_moe.routing.metrics.load_arrays import (
    coefficient_of_variation,
    dead,
    excess_coefficient_of_variation,
    null_variance,
    overload_of_steps,
    utilization,
)
from nemo_rl_moe.routing.metrics.modalities import modality_overlap, modality_separation, specialization
from nemo_rl_moe.runs.folder.expert_load import ExpertLoadHistory
from nemo_rl_moe.runs.folder.saved_samples import evenly_spaced
from nemo_rl_moe.runs.report.arrays import ArrayPool, highest_of_stretches, in_parts, narrowest

OUTLIERS_OF_A_KIND = 5
_MOST_COLUMNS, _MOST_POINTS, _FEWEST = 300, 400, 10


def load_view(
    load: ExpertLoadHistory, topk: int | None, own_size: int, pool: ArrayPool, detail: float = 1.0
) -> dict[str, Any]:
    """Return the data of the charts about the expert load, without the loads themselves.

    - `layers`, `num_experts`, `num_steps`
    - `by_layer`: spread of loads and number of dead experts, `[stretches, layers]`, as the highest value in each
      stretch of consecutive steps
    - `outliers`: utilization over time of the most and least loaded experts
    - `what_if`: overload (work of the busiest rank over the mean) over time for each expert-parallel size

    Args:
        own_size: Expert-parallel size of the run.
        detail: Factor on the number of points of each line, 1 for full detail.
    """
    points = max(int(_MOST_POINTS * detail), _FEWEST)
    return {
        "layers": load.layers.tolist(),
        "num_experts": load.num_experts,
        "num_steps": len(load.steps),
        "by_layer": _by_layer(load, topk, pool, max(int(_MOST_COLUMNS * detail), _FEWEST)),
        "outliers": _outliers(load, pool, points),
        "what_if": _what_if(load, own_size, pool, points),
    }


def outlier_experts(load: ExpertLoadHistory) -> dict[str, list[tuple[int, int]]]:
    """Return the most and least loaded experts over the last tenth of the steps, as `(index of the layer, expert)`."""
    mean = utilization(load.counts[-max(len(load.steps) // 10, 1) :]).mean(0)
    order = np.argsort(mean, axis=None, kind="stable")
    number = min(OUTLIERS_OF_A_KIND, len(order) // 2)
    chosen = {"most": order[::-1][:number], "least": order[:number]}
    return {which: [divmod(position, load.num_experts) for position in chosen[which].tolist()] for which in chosen}


def expert_parallel_sizes(num_experts: int) -> list[int]:
    """Return the expert-parallel sizes above 1 that divide the number of experts."""
    return [size for size in range(2, num_experts + 1) if num_experts % size == 0]


def _by_layer(load: ExpertLoadHistory, topk: int | None, pool: ArrayPool, columns: int) -> dict[str, Any]:
    def spread(counts: Int[np.ndarray, "steps layers experts"]) -> Float[np.ndarray, "steps layers"]:
        cv = coefficient_of_variation(counts)
        return cv if topk is None else excess_coefficient_of_variation(cv, null_variance(counts, topk))

    last, highest = highest_of_stretches(in_parts(spread, load.counts), columns)
    _, most_dead = highest_of_stretches(in_parts(lambda counts: dead(counts).sum(-1), load.counts), columns)
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
        overload = in_parts(lambda counts, size=size: overload_of_steps(counts, size), load.counts)
        late_of_layers = overload[late].mean(0)
        sizes.append(
            {
                "size": size,
                "values": pool.add(overload[chosen].mean(1).astype(np.float32)),
                "late_mean": float(overload[late].mean()),
                "late_worst_layer": float(late_of_layers.max()),
                "late_worst_layer_index": int(load.layers[late_of_layers.argmax()]),
            }
        )
    return {"own_size": own_size, "steps": pool.add(load.steps[chosen].astype(np.int32)), "sizes": sizes}


_MOST_FRAMES = 200
_MOST_CELLS = 60_000
"""Largest number of cells (layer and expert) over all shown steps. Thus large models have fewer steps."""
_COLUMNS = ("separation", "overlap", "busiest, image", "busiest, text")


def modality_view(
    load: ExpertLoadHistory, topk: int | None, pool: ArrayPool, detail: float = 1.0
) -> dict[str, Any] | None:
    """Return the data of the cards about image tokens and text tokens, for steps with both kinds.

    None if the run did not count image tokens, and only `num_steps` if no step has both kinds. Otherwise:

    - `layers`, `num_experts`, `num_steps`
    - `steps`, and the `counts`, `image_counts` and `specialization` (NaN for an expert without tokens) at these steps
    - `by_layer`: separation of the experts of image and text tokens (0: chance, 1: no expert in common), `[stretches,
      layers]`, as the highest value in each stretch of consecutive steps. NaN if unknown.
    - `table`: a row for each layer at the last of these steps
    """
    if load.image_counts is None:
        return None
    of_images = load.image_counts.sum((1, 2))
    is_mixed = (of_images > 0) & (of_images < load.counts.sum((1, 2)))
    steps, counts, image_counts = load.steps[is_mixed], load.counts[is_mixed], load.image_counts[is_mixed]
    if not len(steps):
        return {"num_steps": 0}
    frames = evenly_spaced(len(steps), max(int(min(_MOST_FRAMES, _MOST_CELLS // counts[0].size) * detail), 1))
    separation = in_parts(partial(modality_separation, topk=topk), counts, image_counts)
    last, highest = highest_of_stretches(
        np.where(np.isnan(separation), -np.inf, separation), max(int(_MOST_COLUMNS * detail), _FEWEST)
    )
    leaning = specialization(counts[frames], image_counts[frames], topk)
    return {
        "layers": load.layers.tolist(),
        "num_experts": load.num_experts,
        "num_steps": len(steps),
        "steps": pool.add(steps[frames].astype(np.int32)),
        "counts": pool.add(narrowest(counts[frames])),
        "image_counts": pool.add(narrowest(image_counts[frames])),
        # Rounded values pack better.
        "specialization": pool.add(leaning.round(3).astype(np.float32)),
        "by_layer": {
            "steps": pool.add(steps[last].astype(np.int32)),
            "steps_of_a_column": -(-len(steps) // len(last)),
            "separation": pool.add(np.where(np.isfinite(highest), highest, np.nan).astype(np.float32)),
        },
        "table": layer_table(int(steps[-1]), load.layers.tolist(), counts[-1], image_counts[-1], topk),
    }


def layer_table(
    step: int,
    layers: list[int],
    counts: Int[np.ndarray, "layers experts"],
    image_counts: Int[np.ndarray, "layers experts"],
    topk: int | None,
) -> dict[str, Any]:
    """Return a table with a row for each layer at a step: `title`, `step`, `columns` and `rows`."""
    text_counts = counts - image_counts
    columns = [
        modality_separation(counts, image_counts, topk),
        modality_overlap(counts, image_counts),
        *(utilization(of_kind).max(-1) - 1 for of_kind in (image_counts, text_counts)),
    ]
    rows = [
        [layer, *(None if np.isnan(value) else f"{value:.3f}" for value in values)]
        for layer, values in zip(layers, np.stack(columns, axis=1), strict=True)
    ]
    return {"title": "Image and text, layer by layer", "step": step, "columns": list(_COLUMNS), "rows": rows}
