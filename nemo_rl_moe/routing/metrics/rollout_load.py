# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Load of the experts in the rollout, by the captured routes of a step."""

from collections.abc import Sequence

from torch import Tensor

from nemo_rl_moe.routing.metrics.metric_keys import ROLLOUT_PREFIX
from nemo_rl_moe.shapes import Int


def rollout_load_metrics(
    counts: Int[Tensor, "layers experts"], layers: Sequence[int], *, per_layer: bool
) -> dict[str, float]:
    """Return verl's metrics of the rollout's load, of `v_e = E * c_e / sum c - 1` for expert `e` of `E`.

    `max_vio` and `min_vio` are the largest and smallest `v_e` of a layer, and `avg_vio` is the mean of `|v_e|`. Each
    has `max` and `avg` over the layers, and with `per_layer` the value of each layer. In a layer without captured
    routes each is -1, -1 and 1. Empty if no route was captured.

    Args:
        counts: Number of captured assignments to each expert.
        layers: Index of each layer in the keys.
    """
    if not counts.any():
        return {}
    exact = counts.double()
    violations = exact * exact.shape[1] / exact.sum(1, keepdim=True).clamp(min=1) - 1
    of_layers = {
        "max_vio": violations.amax(1).tolist(),
        "min_vio": violations.amin(1).tolist(),
        "avg_vio": violations.abs().mean(1).tolist(),
    }
    metrics = {}
    for name, values in of_layers.items():
        metrics[f"{ROLLOUT_PREFIX}{name}/max"] = max(values)
        metrics[f"{ROLLOUT_PREFIX}{name}/avg"] = sum(values) / len(values)
        if per_layer:
            named = zip(layers, values, strict=True)
            metrics |= {f"{ROLLOUT_PREFIX}{name}/layer_{layer}": value for layer, value in named}
    return metrics
