# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Metrics of the load of image tokens and of text tokens, for a model with vision."""

from statistics import fmean

import numpy as np
import torch

from nemo_rl_moe.routing.metrics.load_statistics import ExpertLoad, layer_statistics
from nemo_rl_moe.routing.metrics.modalities import modality_overlap, modality_separation

_OF_EACH = ("max_violation", "expert_diversity", "dead_expert_frac")
"""Fields of `LayerStatistics` that become metrics of image tokens and of text tokens."""


def modality_metrics(load: ExpertLoad, *, detailed: bool = False) -> dict[str, float]:
    if load.image_counts is None:
        return {}
    counts, image_counts = load.counts, load.image_counts
    total, of_images = int(counts.sum()), int(image_counts.sum())
    metrics = {"image/token_share": of_images / max(total, 1)}
    if of_images in (0, total):
        return metrics
    num_layers = len(load.layers)
    layers = layer_statistics(torch.cat([image_counts, counts - image_counts]), None)
    rows = {"image": slice(num_layers), "text": slice(num_layers, None)}
    by_layer = {(kind, name): getattr(layers, name)[of_kind] for kind, of_kind in rows.items() for name in _OF_EACH}
    metrics |= {f"{kind}/{name}_mean": fmean(values) for (kind, name), values in by_layer.items()}
    separation = modality_separation(counts.numpy(), image_counts.numpy(), load.topk)
    overlap = modality_overlap(counts.numpy(), image_counts.numpy())
    is_known = ~np.isnan(separation)  # layers with tokens of both modalities
    if is_known.any():
        metrics |= {
            "modality_separation_mean": float(separation[is_known].mean()),
            "modality_separation_max": float(separation[is_known].max()),
            "modality_overlap_mean": float(overlap[is_known].mean()),
        }
    if detailed:
        for row, layer in enumerate(load.layers):
            metrics |= {f"layer_{layer}/{kind}_{name}": values[row] for (kind, name), values in by_layer.items()}
            if is_known[row]:
                metrics[f"layer_{layer}/modality_separation"] = float(separation[row])
                metrics[f"layer_{layer}/modality_overlap"] = float(overlap[row])
    return metrics
