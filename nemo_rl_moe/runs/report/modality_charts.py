# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Charts of what image tokens and text tokens do in the routers, of runs of a model with vision."""

from functools import partial

from nemo_rl_moe.runs.report.chart import Chart, Line

MODALITIES = "Image and text tokens"
_chart = partial(Chart, MODALITIES)

MODALITY_CHARTS = (
    _chart(
        "Separation and overlap of image and text",
        "Separation: how far the experts part image tokens from text tokens, beyond chance (Cramér's V): 0 not at all, "
        "1 wholly. Overlap: what the loads of both kinds have in common: 1 all, 0 no expert. Means over the layers. "
        "Healthy: steady.",
        [
            Line("train/moe/modality_separation_mean", "separation"),
            Line("train/moe/modality_overlap_mean", "overlap"),
        ],
        from_zero=True,
    ),
    _chart(
        "Share of image tokens",
        "Of all assignments of tokens to experts. Healthy: as the data has it; 0 means that no batch had an image.",
        [Line("train/moe/image/token_share", "image tokens")],
        from_zero=True,
    ),
    _chart(
        "Busiest expert, of image and of text tokens",
        "Load of the busiest expert over its fair share, minus 1 (max_violation), of each kind alone, mean of the "
        "layers. Healthy: flat. Rising: the kind crowds into few experts.",
        [
            Line("train/moe/image/max_violation_mean", "image"),
            Line("train/moe/text/max_violation_mean", "text"),
        ],
        from_zero=True,
    ),
    _chart(
        "Experts in effective use, by image and by text tokens",
        "Share of a layer's experts that a kind's load spreads over, by its entropy: 1 is all of them evenly. Healthy: "
        "flat. Falling: the kind crowds into few experts.",
        [
            Line("train/moe/image/expert_diversity_mean", "image"),
            Line("train/moe/text/expert_diversity_mean", "text"),
        ],
    ),
    _chart(
        "Experts without image tokens, without text tokens",
        "Share of the experts that no token of the kind went to in a step, mean of the layers. Healthy: low and flat. "
        "Rising: a kind is left with fewer experts.",
        [
            Line("train/moe/image/dead_expert_frac_mean", "without image tokens"),
            Line("train/moe/text/dead_expert_frac_mean", "without text tokens"),
        ],
        from_zero=True,
    ),
)
