# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Load balance metrics, brief and detailed, from assignment counts.

Usable in any training loop:

    enable_load_balance_tracking(model)
    ...                                        # train
    metrics = compute_brief_metrics(collect_expert_loads(model, dp_group))

`metric_keys.with_moe_prefix` adds the prefix `moe/` to the keys. No value is NaN or infinite. Layers without load take
part in every mean, with the values given in `LayerStatistics`.
"""

import math
import statistics
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np
import torch

from nemo_rl_moe.routing.metrics.load_balance_tracking import (
    collect_expert_loads,
    disable_load_balance_tracking,
    enable_load_balance_tracking,
)
from nemo_rl_moe.routing.metrics.load_statistics import (
    ExpertLoad,
    LayerLoad,
    LayerStatistics,
    joined,
    layer_statistics,
    positions_at_ranks,
)
from nemo_rl_moe.routing.metrics.metric_keys import indices_of_layers, outlier_key

__all__ = [
    "ExpertLoad",
    "LayerLoad",
    "collect_expert_loads",
    "compute_brief_metrics",
    "compute_detailed_metrics",
    "disable_load_balance_tracking",
    "enable_load_balance_tracking",
    "load_balance_metrics",
]


def compute_brief_metrics(
    layer_loads: Mapping[int, LayerLoad] | Mapping[str, LayerLoad], top_k: int = 5, *, router_topk: int | None = None
) -> dict[str, float]:
    """Return the brief load balance metrics. With the default `top_k`, at most 60 keys summarise all layers.

    Args:
        layer_loads: MoE layer (its global index or module name) -> its load. Keys contain the layer's index, see
            `indices_of_layers`. Layers may have different numbers of experts.
        top_k: Number of most used, and of least used, experts whose utilization is returned.
        router_topk: Number of experts of each token, for loads without `topk`.

    Returns:
        Key -> value. Empty without layers. `cv_null_mean` and `cv_excess_mean` are omitted if some layer's top-k is
        unknown, and `aux_loss_mean` if no layer has a loss.

    Raises:
        ValueError: An `expert_load` does not have `n_experts` entries.
    """
    return _compute(layer_loads, top_k, router_topk, detailed=False)


def compute_detailed_metrics(
    layer_loads: Mapping[int, LayerLoad] | Mapping[str, LayerLoad], top_k: int = 5, *, router_topk: int | None = None
) -> dict[str, float]:
    """Return the brief metrics and `layer_{i}/...` of each layer. Arguments as in `compute_brief_metrics`."""
    return _compute(layer_loads, top_k, router_topk, detailed=True)


def load_balance_metrics(
    load: ExpertLoad,
    *,
    router_topk: int | None = None,
    aux_losses: Sequence[float | None] | None = None,
    top_k_experts: int = 5,
    detailed: bool = False,
) -> dict[str, float]:
    """Return the brief or detailed metrics of a load matrix.

    Args:
        router_topk: Number of experts of each token. If it is None, the noise-corrected keys are omitted.
        aux_losses: Load balancing loss of each layer, before multiplication with its coefficient. None for a layer
            without one.
    """
    if not load.layers:
        return {}
    indices, counts_LE = list(load.layers), load.counts
    losses = [None] * len(indices) if aux_losses is None else list(aux_losses)
    if indices != sorted(indices):
        order = sorted(range(len(indices)), key=indices.__getitem__)
        counts_LE = counts_LE[order]
        indices, losses = [indices[row] for row in order], [losses[row] for row in order]
    return _metrics(layer_statistics(counts_LE, router_topk), indices, losses, top_k_experts, detailed)


def _compute(
    layer_loads: Mapping[int, LayerLoad] | Mapping[str, LayerLoad],
    top_k: int,
    router_topk: int | None,
    *,
    detailed: bool,
) -> dict[str, float]:
    loads: dict[int | str, LayerLoad] = dict(layer_loads.items())
    if not loads:
        return {}
    indices = indices_of_layers(loads)
    entries = [loads[layer] for layer in indices]
    for layer, entry in zip(indices, entries, strict=True):
        if entry["expert_load"].numel() != entry["n_experts"]:
            raise ValueError(
                f"layer {layer!r}: expert_load has {entry['expert_load'].numel()} entries, n_experts is "
                f"{entry['n_experts']}"
            )
    layers = _statistics_in_order(entries, router_topk)
    return _metrics(layers, list(indices.values()), _losses_on_host(entries), top_k, detailed)


def _statistics_in_order(entries: Sequence[LayerLoad], router_topk: int | None) -> LayerStatistics:
    topks = [router_topk if entry.get("topk") is None else entry["topk"] for entry in entries]
    known = [float(topk) for topk in topks if topk is not None]
    rows_of_size: dict[int, list[int]] = {}
    for row, entry in enumerate(entries):
        rows_of_size.setdefault(entry["n_experts"], []).append(row)
    parts = []
    for rows in rows_of_size.values():
        counts_LE = torch.stack([entries[row]["expert_load"] for row in rows]).detach()
        topk_L = np.array([known[row] for row in rows]) if len(known) == len(entries) else None
        # To the host before float64, which some devices lack.
        parts.append(layer_statistics(counts_LE.cpu().to(torch.float64), topk_L))
    if len(parts) == 1:
        return parts[0]
    return joined(parts, [row for rows in rows_of_size.values() for row in rows])


def _losses_on_host(entries: Sequence[LayerLoad]) -> list[float | None]:
    present = {row: loss.detach() for row, entry in enumerate(entries) if (loss := entry["aux_loss"]) is not None}
    if not present:
        return [None] * len(entries)
    on_host = torch.stack([loss.reshape(()) for loss in present.values()]).tolist()
    by_row: dict[int, float] = dict(zip(present, on_host, strict=True))
    return [by_row.get(row) for row in range(len(entries))]


def _metrics(
    layers: LayerStatistics, indices: Sequence[int], aux_losses: Sequence[float | None], top_k: int, detailed: bool
) -> dict[str, float]:
    losses = [loss for loss in aux_losses if loss is not None]
    metrics = {
        "cv_mean": _mean(layers.cv),
        "cv_median": statistics.median(layers.cv),
        "cv_min": min(layers.cv),
        "cv_max": max(layers.cv),
        "max_violation_mean": _mean(layers.max_violation),
        "max_violation_max": max(layers.max_violation),
        "dead_expert_frac_mean": _mean(layers.dead_expert_frac),
        "expert_diversity_mean": _mean(layers.expert_diversity),
        "expert_diversity_min": min(layers.expert_diversity),
    }
    if layers.cv_null is not None and layers.cv_excess is not None:
        metrics |= {"cv_null_mean": _mean(layers.cv_null), "cv_excess_mean": _mean(layers.cv_excess)}
    if losses:
        metrics["aux_loss_mean"] = _mean(losses)
    metrics |= _utilization_in_order(layers, indices, top_k)
    return metrics | _details(layers, indices, aux_losses) if detailed else metrics


def _mean(values: Sequence[float]) -> float:
    # fsum rounds once, so the order of the layers does not change the last bit.
    return math.fsum(values) / len(values)


def _utilization_in_order(layers: LayerStatistics, indices: Sequence[int], top_k: int) -> dict[str, float]:
    count = len(layers.utilization)
    # The median of an even number of values is the mean of the middle two. The quartiles are values in the data.
    ranks = [0, count // 4, (count - 1) // 2, count // 2, 3 * count // 4, count - 1]
    num_quantiles = len(ranks)
    num_outliers = max(0, min(top_k, count))
    ranks += [*range(num_outliers), *range(count - num_outliers, count)]
    positions = positions_at_ranks(layers.utilization, ranks)
    values = layers.utilization[positions].tolist()
    lowest, first_quartile, below, above, third_quartile, highest = values[:num_quantiles]
    metrics = {
        "expert_utilization_min": lowest,
        "expert_utilization_p25": first_quartile,
        "expert_utilization_median": (below + above) / 2,
        "expert_utilization_p75": third_quartile,
        "expert_utilization_max": highest,
    }
    first_of_layer = list(accumulate(layers.num_experts, initial=0))
    for position, value in zip(positions[num_quantiles:].tolist(), values[num_quantiles:], strict=True):
        row = bisect_right(first_of_layer, position) - 1
        metrics[outlier_key(indices[row], position - first_of_layer[row])] = value
    return metrics


def _details(layers: LayerStatistics, indices: Sequence[int], aux_losses: Sequence[float | None]) -> dict[str, float]:
    details: dict[str, float] = {}
    for row, index in enumerate(indices):
        prefix = f"layer_{index}/"
        details[prefix + "cv"] = layers.cv[row]
        loss = aux_losses[row]
        if loss is not None:
            details[prefix + "aux_loss"] = loss
        details[prefix + "utilization_mean"] = layers.utilization_mean[row]
        details[prefix + "dead_expert_frac"] = layers.dead_expert_frac[row]
        details[prefix + "expert_diversity"] = layers.expert_diversity[row]
        details[prefix + "max_violation"] = layers.max_violation[row]
    return details
