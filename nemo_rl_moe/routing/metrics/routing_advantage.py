# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Experts by advantage: how far experts get tokens of responses with high or with low advantage, beyond chance.

Chance is a permutation of advantages among the responses that were compared with each other. All tokens and sequences
of a response share one reward, so a response is one observation of any length. Under the permutation, mean and variance
of an expert's score are known exactly (linear rank statistic: Hajek, Sidak and Sen, Theory of Rank Tests, section 3.3).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nemo_rl_moe.shapes import Bool, Float, Int

_MOST_COUNTS = 1 << 18
"""Number of counts whose scores are computed at once."""


@dataclass(frozen=True)
class AdvantageScores:
    layers: tuple[int, ...]
    scores: Float[Tensor, "layers experts"]


def add_sequence_assignments(
    counts: Int[Tensor, "rows layers experts"],
    layer: int | Int[Tensor, "layers 1 1"],
    routed: Bool[Tensor, "tokens experts"] | Int[Tensor, "tokens topk"] | Int[Tensor, "layers tokens topk"],
    rows: Int[Tensor, " tokens"],
) -> None:
    """Add router calls of one or several layers to counts per sequence, in place, without a host synchronisation.

    `rows` has the index of each token's sequence.
    """
    if routed.dtype == torch.bool:
        counts[:, layer].index_add_(0, rows, routed.to(counts.dtype))
        return
    _, num_layers, num_experts = counts.shape
    places = (rows * (num_layers * num_experts))[:, None] + routed + layer * num_experts
    counts.view(-1).scatter_add_(0, places.reshape(-1), counts.new_ones(()).expand(places.numel()))


class TrainedResponses(NamedTuple):
    """Trained sequences or complete responses, with their experts and advantages.

    Attributes:
        counts: Number of tokens that each layer sends to each expert.
        advantages: Mean advantage of the trained tokens.
        groups: Id of the group of responses with which the advantage was computed.
    """

    counts: Float[Tensor, "responses layers experts"]
    advantages: Float[Tensor, " responses"]
    groups: Int[Tensor, " responses"]


def joined_by_sample(
    sequences: TrainedResponses, num_tokens: Float[Tensor, " sequences"], samples: Int[Tensor, " sequences"]
) -> TrainedResponses:
    """Return one entry per sample (sampled response), with all of its sequences, since they share one reward.

    Counts are added, and advantages are means over all trained tokens. Without this, the sequences of a restarted
    conversation would count as independent responses with equal advantages.

    Args:
        num_tokens: Number of trained tokens of each sequence.
        samples: Id of the sample of each sequence.
    """
    numbers, places = samples.unique(return_inverse=True)
    if len(numbers) == len(samples):
        return sequences
    first = torch.full(numbers.shape, len(places)).scatter_reduce_(0, places, torch.arange(len(places)), "amin")
    advantages = sequences.advantages.double()
    # Relative to the sample's first advantage: a mean of equal numbers can differ from them in the last bit.
    off_first = num_tokens * (advantages - advantages[first][places])
    sums = torch.zeros(2, len(numbers), dtype=torch.float64).index_add_(1, places, torch.stack([off_first, num_tokens]))
    counts = sequences.counts.new_zeros(len(numbers), *sequences.counts.shape[1:])
    return TrainedResponses(
        counts.index_add_(0, places.to(counts.device), sequences.counts),
        advantages[first] + sums[0] / sums[1],
        sequences.groups[first],
    )


class CentredAdvantages(NamedTuple):
    off_mean: Float[Tensor, " sequences"]
    spread: Float[Tensor, " sequences"]
    sizes: Float[Tensor, " sequences"]


def centred(advantages: Float[Tensor, " sequences"], groups: Int[Tensor, " sequences"]) -> CentredAdvantages:
    values, numbers = advantages.double().numpy(), groups.numpy()
    sizes = np.bincount(numbers)
    # Relative to one value of the group: a mean of equal numbers can differ from them in the last bit, and that would
    # count as spread.
    one_of_group = np.empty(len(sizes))
    one_of_group[numbers] = values
    off_one = values - one_of_group[numbers]
    off_mean = off_one - (np.bincount(numbers, off_one) / sizes)[numbers]
    spread = np.bincount(numbers, off_mean * off_mean) / np.maximum(sizes - 1, 1)
    return CentredAdvantages(*map(torch.from_numpy, (off_mean, spread[numbers], sizes[numbers].astype(np.float64))))


def sums_of_groups(
    counts: Float[Tensor, "sequences *layers experts"], groups: Int[Tensor, " sequences"]
) -> Float[Tensor, "sequences *layers experts"]:
    """Return, for each sequence, the sum of the counts of its group: `sum_s n[s,e]` over sequences `s` of the group."""
    sums = counts.new_zeros(int(groups.max()) + 1, *counts.shape[1:]).index_add_(0, groups, counts)
    return sums.index_select(0, groups)


def beyond_length(
    counts: Float[Tensor, "sequences *layers experts"], of_groups: Float[Tensor, "sequences *layers experts"]
) -> Float[Tensor, "sequences *layers experts"]:
    """Return a sequence's assignments minus the number expected from its length: `n[s,e] - T[s] p[g,e]`.

    `n[s,e]` are the counts, `T[s] = sum_e n[s,e]`, and `p[g,e]` is the expert's share of all tokens of the sequence's
    group. The sum over the experts of a sequence is 0, and so is the sum over the sequences of a group.
    """
    lengths, all_lengths = counts.sum(-1, keepdim=True), of_groups.sum(-1, keepdim=True)
    return (counts * all_lengths - lengths * of_groups) / all_lengths.clamp(min=1)


def permutation_moments(
    off_mean: Float[Tensor, "sequences experts"], advantages: CentredAdvantages
) -> tuple[Float[Tensor, " experts"], Float[Tensor, " experts"]]:
    """Return `S[e] = sum_s a_s n[s,e]` minus its mean, and its variance, under permutations of advantages in groups.

    `a_s` is the advantage of sequence `s`, and `n[s,e]` its number of tokens at expert `e`.

    For a group of `m` sequences, `E = mean(a) * sum_s n` and `Var = sum_s (a_s - mean a)^2 * sum_s (n_s - mean n)^2 /
    (m - 1)`. Both are summed over the groups.
    """
    return advantages.off_mean @ off_mean, advantages.spread @ off_mean.square()


def advantage_scores(
    counts: Float[Tensor, "sequences layers experts"],
    advantages: Float[Tensor, " sequences"],
    groups: Int[Tensor, " sequences"],
) -> tuple[Float[Tensor, "layers experts"], Float[Tensor, "layers experts"]]:
    """Return how far experts get tokens of high advantages beyond chance, `z = (S - E) / sqrt(Var)`.

    The first result is computed from token counts, and the second from token counts minus the counts expected from the
    lengths of the sequences (`beyond_length`). NaN if the variance is 0. See
    `permutation_moments` for `S`, `E` and `Var`.
    """
    numbers, groups = groups.unique(return_inverse=True)
    if len(groups) == len(numbers):
        groups = torch.zeros_like(groups)
    of_sequences = centred(advantages, groups)
    scores = []
    # A few layers at a time: float64 copies of all counts would take many times their memory.
    for of_layers in counts.split(max(1, _MOST_COUNTS // max(1, counts[:, 0].numel())), 1):
        counted = of_layers.double()
        of_groups = sums_of_groups(counted, groups)
        for off_mean in (
            counted - of_groups / of_sequences.sizes[:, None, None],
            beyond_length(counted, of_groups),  # adds up to 0 in each group
        ):
            above, variance = permutation_moments(off_mean.flatten(1), of_sequences)
            scores.append((above / variance.sqrt()).view(off_mean.shape[1:]))
    return torch.cat(scores[::2]), torch.cat(scores[1::2])


def advantage_metrics(
    scores: Float[Tensor, "layers experts"], layers: Sequence[int], *, per_layer: bool, of_shares: bool = False
) -> dict[str, float]:
    """Return the metrics of the scores, under `routing_advantage/`. Empty if every score is NaN.

    `excess` is the mean of `z^2 - 1`, which is 0 by chance. `max_abs_z` is the largest absolute score. Both are taken
    over all layers, and with `per_layer` also in each layer.
    """
    kind, on_host = "_of_shares" if of_shares else "", scores.cpu().numpy()
    is_known = ~np.isnan(on_host)
    known = np.where(is_known, on_host, 0.0)
    numbers, squares, largest = (
        each.tolist() for each in (is_known.sum(1), np.square(known).sum(1), np.abs(known).max(1))
    )
    parts = {"": (sum(numbers), fsum(squares), max(largest, default=0.0))}
    if per_layer:
        of_layers = zip(numbers, squares, largest, strict=True)
        parts |= {f"_layer_{layer}": of_layer for layer, of_layer in zip(layers, of_layers, strict=True)}
    metrics = {}
    for ending, (number, sum_of_squares, max_abs_z) in parts.items():
        if number:
            metrics[f"routing_advantage/excess{kind}{ending}"] = sum_of_squares / number - 1
            metrics[f"routing_advantage/max_abs_z{kind}{ending}"] = max_abs_z
    return metrics
