# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Experts by advantage: how far experts serve sequences of high or of low advantage, beyond chance.

Chance is a permutation: advantages change places among the sequences that they were compared with. Mean and variance of
what an expert then gets are known exactly (of a linear rank statistic: Hajek, Sidak and Sen, Theory of Rank Tests,
section 3.3).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nemo_rl_moe.shapes import Bool, Float, Int

_MOST_COUNTS = 1 << 18
"""Counts of which scores are worked out at once."""


@dataclass(frozen=True)
class AdvantageScores:
    """Scores of a step's experts.

    Attributes:
        layers: Index of each MoE layer in the whole model.
        scores: Of `advantage_scores`, of shares, on the host.
    """

    layers: tuple[int, ...]
    scores: Float[Tensor, "layers experts"]


def add_sequence_assignments(
    counts: Int[Tensor, "rows layers experts"],
    layer: int | Int[Tensor, "layers 1 1"],
    routed: Bool[Tensor, "tokens experts"] | Int[Tensor, "tokens topk"] | Int[Tensor, "layers tokens topk"],
    rows: Int[Tensor, " tokens"],
) -> None:
    """Adds one router call, or those of several layers, to the counts, in place, without a host synchronisation.

    Args:
        counts: Assignments of each row, a sequence, so far.
        layer: Position of the router's layer; positions of several, where these are given by indices.
        routed: A map of the assignments, or the indices of the experts that each token is routed to.
        rows: Row of each token.
    """
    if routed.dtype == torch.bool:
        counts[:, layer].index_add_(0, rows, routed.to(counts.dtype))
        return
    _, num_layers, num_experts = counts.shape
    places = (rows * (num_layers * num_experts))[:, None] + routed + layer * num_experts
    counts.view(-1).scatter_add_(0, places.reshape(-1), counts.new_ones(()).expand(places.numel()))


def permutation_moments(
    counts: Float[Tensor, "sequences experts"],
    advantages: Float[Tensor, " sequences"],
    groups: Int[Tensor, " sequences"],
) -> tuple[Float[Tensor, " experts"], Float[Tensor, " experts"], Float[Tensor, " experts"]]:
    """`S[e] = sum_s a_s n[s,e]`, and its mean and variance where advantages change places within their groups.

    Of a group of `m` sequences, `E = mean(a) * sum_s n` and
    `Var = sum_s (a_s - mean a)^2 * sum_s (n_s - mean n)^2 / (m - 1)`; those of all groups add up.

    Args:
        counts: `n`.
        advantages: `a`.
        groups: Group of each sequence, from 0.

    Returns:
        `S`, `E` and `Var`.
    """
    num_groups = int(groups.max()) + 1
    sizes = groups.bincount(minlength=num_groups).to(counts)

    def sums(values: Tensor) -> Tensor:
        return values.new_zeros(num_groups, *values.shape[1:]).index_add_(0, groups, values)

    mean_advantages, mean_counts = sums(advantages) / sizes, sums(counts) / sizes[:, None]
    off_mean = advantages - mean_advantages[groups]
    # A mean of equal numbers can be off by their last bit, and no spread would become a tiny one.
    off_mean = off_mean.where(_varies(advantages, groups, num_groups)[groups], 0.0)
    spread = sums(off_mean.square()) / (sizes - 1).clamp(min=1)
    spread_of_counts = sums((counts - mean_counts[groups]).square())
    expected = (mean_advantages[:, None] * mean_counts * sizes[:, None]).sum(0)
    return advantages @ counts, expected, spread @ spread_of_counts


def _varies(values: Tensor, groups: Tensor, num_groups: int) -> Bool[Tensor, " groups"]:
    bounds = [
        values.new_zeros(num_groups).scatter_reduce(0, groups, values, kind, include_self=False)
        for kind in ("amin", "amax")
    ]
    return bounds[0] != bounds[1]


def beyond_length(
    counts: Float[Tensor, "sequences *layers experts"], groups: Int[Tensor, " sequences"]
) -> Float[Tensor, "sequences *layers experts"]:
    """Excess of a sequence's assignments over its length's share: `n[s,e] - T[s] p[g,e]`, exactly 0 where it has none.

    `T[s] = sum_e n[s,e]`, and `p[g,e]` is the expert's share of all tokens of the sequence's group. Both add up to 0:
    over the experts of a sequence, and over the sequences of a group.

    Args:
        counts: `n`, whole numbers.
        groups: Group of each sequence, from 0.
    """
    of_groups = counts.new_zeros(int(groups.max()) + 1, *counts.shape[1:]).index_add_(0, groups, counts)[groups]
    lengths, all_lengths = counts.sum(-1, keepdim=True), of_groups.sum(-1, keepdim=True)
    return (counts * all_lengths - lengths * of_groups) / all_lengths.clamp(min=1)


def advantage_scores(
    counts: Float[Tensor, "sequences layers experts"],
    advantages: Float[Tensor, " sequences"],
    groups: Int[Tensor, " sequences"],
) -> tuple[Float[Tensor, "layers experts"], Float[Tensor, "layers experts"]]:
    """`z = (S - E) / sqrt(Var)` of `permutation_moments`; NaN where the variance is 0.

    Args:
        counts: Tokens of each sequence that a layer sends to an expert.
        advantages: Of each sequence.
        groups: Sequences whose advantages were compared with each other have the same number, from 0. Where no group
            has two, all are one.

    Returns:
        Scores of the counts; and of shares, the counts `beyond_length`: an expert prefers what has a larger share of
        its own tokens than of all, and an advantage that goes with length is no preference.
    """
    advantages, groups = advantages.double(), groups.unique(return_inverse=True)[1]
    if len(groups) == int(groups.max()) + 1:
        groups = torch.zeros_like(groups)
    scores = []
    # Some layers at a time: copies of all counts in float64 would be many times the counts' memory.
    for of_layers in counts.split(max(1, _MOST_COUNTS // max(1, counts[:, 0].numel())), 1):
        numbers = of_layers.double()
        both = torch.stack([numbers, beyond_length(numbers, groups)], 1)
        found, expected, variance = permutation_moments(both.flatten(1), advantages, groups)
        of_experts = ((found - expected) / variance.sqrt()).where(variance > 0, torch.nan)
        scores.append(of_experts.view(both.shape[1:]))
    of_counts, of_shares = torch.cat(scores, 1)
    return of_counts, of_shares


def advantage_metrics(
    scores: Float[Tensor, "layers experts"], layers: Sequence[int], *, per_layer: bool, of_shares: bool = False
) -> dict[str, float]:
    """Metrics of the scores, under `routing_advantage/`; empty where every score is NaN.

    `excess` is the mean of `z^2 - 1`, which is 0 by chance, and `max_abs_z` the largest size of a score, of all layers
    and experts and of each layer's.

    Args:
        scores: Of `advantage_scores`.
        layers: Global indices of the MoE layers.
        per_layer: Add those of each layer.
        of_shares: They are of shares: so are the names, `excess_of_shares` and `max_abs_z_of_shares`.
    """
    kind, on_host = "_of_shares" if of_shares else "", scores.cpu().numpy()
    parts = {"": on_host.reshape(-1)}
    if per_layer:
        parts |= {f"_layer_{layer}": row for layer, row in zip(layers, on_host, strict=True)}
    metrics = {}
    for ending, values in parts.items():
        known = values[~np.isnan(values)]
        if len(known):
            metrics[f"routing_advantage/excess{kind}{ending}"] = float(np.square(known).mean()) - 1
            metrics[f"routing_advantage/max_abs_z{kind}{ending}"] = float(np.abs(known).max())
    return metrics
