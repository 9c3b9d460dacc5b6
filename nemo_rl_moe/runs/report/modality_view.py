# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Image tokens and text tokens in a page: which experts serve which kind, and how far each layer parts them."""

from functools import partial
from typing import Any

import numpy as np

from nemo_rl_moe.routing.metrics.load_arrays import utilization
from nemo_rl_moe.routing.metrics.modalities import modality_overlap, modality_separation, specialization
from nemo_rl_moe.runs.folder.expert_load import ExpertLoadHistory
from nemo_rl_moe.runs.folder.samples import evenly_spaced
from nemo_rl_moe.runs.report.arrays import ArrayPool, highest_of_stretches, in_parts, narrowest
from nemo_rl_moe.shapes import Int

_MOST_COLUMNS, _MOST_FRAMES, _FEWEST = 300, 200, 10
_MOST_CELLS = 60_000
"""Cells of experts over all steps that are kept: fewer steps for large models."""
_COLUMNS = ("separation", "overlap", "busiest, image", "busiest, text")


def modality_view(
    load: ExpertLoadHistory, topk: int | None, pool: ArrayPool, detail: float = 1.0
) -> dict[str, Any] | None:
    """Return the data of the cards about image tokens and text tokens.

    Returns:
        `layers`; `num_experts`; `num_steps`, those with tokens of both kinds; `steps`, `counts`, `image_counts` and
        `specialization` of single ones, NaN where an expert has no token; `by_layer`: separation of layers x steps, of
        each stretch of steps the highest, NaN where it is not known; `table`: of each layer at the last of these steps.
        None where the run did not count the kinds apart; `num_steps` alone where no step has both.
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
        # Of a few distinct values, which pack well.
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
    """Return a step's table of layers: `title`, `step`, `columns`, and `rows`."""
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
