# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Image and text tokens at the experts: how far they separate, beyond chance. It needs only numpy, for the report.

Chance is a permutation: the tokens of a layer keep their experts, and exchange their modality. If a share `s` of `T`
tokens are image tokens, an expert with `c` tokens then has a hypergeometric number of image tokens, with mean `s c` and
variance `s (1 - s) c (T - c) / (T - 1)`. These are exact for any top-k, because a token goes to each expert at most
once.
"""

import numpy as np

from nemo_rl_moe.shapes import Float, Int


def image_share_of_layers(
    counts: Int[np.ndarray, "*steps layers experts"], image_counts: Int[np.ndarray, "*steps layers experts"]
) -> Float[np.ndarray, "*steps layers"]:
    """Return the share `s` of image tokens in each layer's assignments, NaN in a layer without load."""
    return _ratio(image_counts.sum(-1), counts.sum(-1))


def specialization(
    counts: Int[np.ndarray, "*steps layers experts"],
    image_counts: Int[np.ndarray, "*steps layers experts"],
    topk: int | None,
) -> Float[np.ndarray, "*steps layers experts"]:
    """Return each expert's preference beyond chance: 1 for image tokens only, -1 for text only, NaN for one modality.

    It is `sign(q - s) sqrt(max(0, (q - s)^2 - v) / (b^2 - v))`, where `q` is the image share of the expert's tokens,
    `s` the image share of all tokens of the layer, `v` the variance of `q` by chance, and `b` the largest possible
    difference between `q` and `s` in the same direction (`1 - s` or `s`). The preference is 0 if `b` is not beyond
    chance, as for an expert with few tokens.
    """
    shares = image_share_of_layers(counts, image_counts)[..., None]
    off_share = _ratio(image_counts, counts) - shares
    tokens = _num_tokens(counts, topk)[..., None]
    with np.errstate(invalid="ignore"):
        variance = shares * (1 - shares) * _ratio((tokens - counts).clip(min=0), (tokens - 1) * counts)
        room = np.where(off_share > 0, 1 - shares, shares) ** 2 - variance
        square = (off_share**2 - variance).clip(min=0) / np.where(room > 0, room, np.inf)
        found = np.sign(off_share) * np.sqrt(square.clip(max=1))
    return np.where(_is_mixed(shares) & (counts > 0), found, np.nan)


def modality_separation(
    counts: Int[np.ndarray, "*steps layers experts"],
    image_counts: Int[np.ndarray, "*steps layers experts"],
    topk: int | None,
) -> Float[np.ndarray, "*steps layers"]:
    """Return how far experts separate image and text tokens beyond chance: 0 not at all, 1 fully, NaN for one modality.

    Cramer's V of modality and expert, `V^2 = sum_e c_e (q_e - s)^2 / (s (1 - s) sum_e c_e)`, is corrected for its mean
    by chance `V0^2 = (E' - k) / ((T - 1) k)`: `sqrt(max(0, V^2 - V0^2) / (1 - V0^2))`. Expert `e` has `c_e` tokens with
    the image share `q_e`. The layer has `T` tokens with the image share `s`, the top-k `k`, and `E'` experts with
    tokens. The correction is that of Bergsma (2013, Journal of the Korean Statistical Society 42) with the mean
    of the permutation, which holds for any top-k. With equal numbers of image and text tokens, 0.5 means that each
    expert has three tokens of one modality per token of the other modality.
    """
    shares = image_share_of_layers(counts, image_counts)
    tokens, totals = _num_tokens(counts, topk), counts.sum(-1)
    off_share = np.where(counts > 0, _ratio(image_counts, counts) - shares[..., None], 0.0)
    with np.errstate(invalid="ignore"):
        square = _ratio((counts * off_share**2).sum(-1), shares * (1 - shares) * totals)
        missing = np.where(counts > 0, (tokens[..., None] - counts).clip(min=0), 0.0).sum(-1)
        by_chance = _ratio(missing, (tokens - 1) * totals)
        beyond = (square - by_chance).clip(min=0) / np.where(by_chance < 1, 1 - by_chance, np.inf)
        return np.where(_is_mixed(shares), np.sqrt(beyond.clip(max=1)), np.nan)


def modality_overlap(
    counts: Int[np.ndarray, "*steps layers experts"], image_counts: Int[np.ndarray, "*steps layers experts"]
) -> Float[np.ndarray, "*steps layers"]:
    """Return the overlap of image and text tokens' experts: 1 for the same load, 0 if disjoint, NaN for one modality.

    It is Weitzman's coefficient `sum_e min(i_e / sum i, t_e / sum t)` of the loads `i` of image and `t` of text tokens.
    By chance it is a little below 1.
    """
    text_counts = counts - image_counts
    shares = [_ratio(of_kind, of_kind.sum(-1, keepdims=True)) for of_kind in (image_counts, text_counts)]
    return np.minimum(*shares).sum(-1)


def _num_tokens(
    counts: Int[np.ndarray, "*steps layers experts"], topk: int | None
) -> Float[np.ndarray, "*steps layers"]:
    """Return `T`, the assignments over top-k, but at least the busiest expert's tokens, as a capacity drops some."""
    return np.maximum(counts.sum(-1) / (topk or 1), counts.max(-1, initial=0))


def _is_mixed(shares: Float[np.ndarray, "..."]) -> np.ndarray:
    return (shares > 0) & (shares < 1)


def _ratio(values: np.ndarray, others: np.ndarray) -> Float[np.ndarray, "..."]:
    values, others = np.broadcast_arrays(np.asarray(values, dtype=np.float64), np.asarray(others, dtype=np.float64))
    return np.divide(values, others, out=np.full(values.shape, np.nan), where=others > 0)
