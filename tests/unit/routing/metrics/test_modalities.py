# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
import torch

from nemo_rl_moe.routing.metrics.load_statistics import ExpertLoad
from nemo_rl_moe.routing.metrics.modalities import (
    image_share_of_layers,
    modality_overlap,
    modality_separation,
    specialization,
)
from nemo_rl_moe.routing.metrics.modality_metrics import modality_metrics

_NAMES = ("max_violation", "expert_diversity", "dead_expert_frac")
RNG = np.random.default_rng(3)


def random_routes(num_tokens: int, num_experts: int, topk: int, rng: np.random.Generator = RNG) -> np.ndarray:
    """Experts of each token as a map, some chosen more often than others."""
    scores = rng.random((num_tokens, num_experts)) * np.linspace(1.0, 2.0, num_experts)
    chosen = np.zeros((num_tokens, num_experts), dtype=np.int64)
    np.put_along_axis(chosen, np.argsort(-scores, 1)[:, :topk], 1, 1)
    return chosen


def raw_separation(counts: np.ndarray, image_counts: np.ndarray) -> Fraction:
    """Cramer's V squared, from the definition: chi-square of the table of modality and expert over its number."""
    total, images = int(counts.sum()), int(image_counts.sum())
    table = [[int(x) for x in image_counts], [int(c - x) for c, x in zip(counts, image_counts, strict=True)]]
    chi_square = Fraction(0)
    for row, of_row in zip(table, (images, total - images), strict=True):
        for found, of_expert in zip(row, counts.tolist(), strict=True):
            if of_expert:
                expected = Fraction(of_row * of_expert, total)
                chi_square += (found - expected) ** 2 / expected
    return chi_square / total


def test_hand_worked() -> None:
    # 16 tokens, half of them image tokens, one expert each; experts have 3 of one kind for each of the other.
    counts, image_counts = np.array([[8, 8]]), np.array([[6, 2]])
    by_chance = (2 - 1) / 15
    assert modality_separation(counts, image_counts, 1)[0] == pytest.approx(
        ((0.25 - by_chance) / (1 - by_chance)) ** 0.5
    )
    # s (1 - s) c (T - c) / (T - 1) / c^2 = 1/4 * 8 / 15 / 8.
    variance = 1 / 60
    expected = ((1 / 16 - variance) / (1 / 4 - variance)) ** 0.5
    np.testing.assert_allclose(specialization(counts, image_counts, 1), [[expected, -expected]])
    assert image_share_of_layers(counts, image_counts).tolist() == [0.5]


@pytest.mark.parametrize("topk", [1, 2, 3])
def test_chance_is_what_all_permutations_give_on_average(topk: int) -> None:
    """Every choice of 3 image tokens out of 7: mean of V^2, and variance of each expert's share, by brute force."""
    routes = random_routes(7, 5, topk)
    counts = routes.sum(0)
    choices = [routes[list(chosen)].sum(0) for chosen in combinations(range(7), 3)]
    mean = float(sum((raw_separation(counts, found) for found in choices), Fraction(0)) / len(choices))
    for found in choices[:5]:
        raw = float(raw_separation(counts, found))
        expected = (max(0.0, raw - mean) / (1 - mean)) ** 0.5
        assert modality_separation(counts[None], found[None], topk)[0] == pytest.approx(expected, abs=1e-7)
    used = counts > 0
    shares = np.stack(choices)[:, used] / counts[used]
    variance = ((shares - 3 / 7) ** 2).mean(0)
    off = shares[0] - 3 / 7
    room = np.where(off > 0, 4 / 7, 3 / 7) ** 2 - variance
    square = np.where(room > 1e-12, (off**2 - variance).clip(min=0) / np.where(room > 1e-12, room, 1), 0).clip(max=1)
    found_scores = specialization(counts[None], choices[0][None], topk)[0]
    np.testing.assert_allclose(found_scores[used], np.sign(off) * np.sqrt(square), atol=1e-7)
    assert np.isnan(found_scores[~used]).all()


@pytest.mark.parametrize(("images", "text"), [((40, 8, 0, 0), (0, 0, 24, 72)), ((5, 0, 0, 0), (0, 0, 0, 5))])
def test_disjoint_experts_are_1(images: tuple[int, ...], text: tuple[int, ...]) -> None:
    counts, image_counts = np.array([images]) + np.array([text]), np.array([images])
    assert modality_separation(counts, image_counts, 1)[0] == 1
    found = specialization(counts, image_counts, 1)[0]
    for expert, (of_images, of_text) in enumerate(zip(images, text, strict=True)):
        if of_images + of_text == 0:
            assert np.isnan(found[expert])
        else:
            assert found[expert] == (1 if of_images else -1)


def test_alike_is_0_and_the_modalities_may_change_places() -> None:
    image_counts = np.array([[30, 10, 20], [1, 200, 3]])
    alike = 4 * image_counts
    assert modality_separation(alike, image_counts, 1).tolist() == [0, 0]
    assert specialization(alike, image_counts, 1).tolist() == [[0, 0, 0], [0, 0, 0]]
    counts = image_counts + RNG.integers(0, 100, image_counts.shape)
    for topk in (1, 2):
        there, back = (modality_separation(counts, found, topk) for found in (image_counts, counts - image_counts))
        np.testing.assert_allclose(there, back)
        there, back = (specialization(counts, found, topk) for found in (image_counts, counts - image_counts))
        np.testing.assert_allclose(there, -back)


def test_neither_order_of_experts_nor_other_steps_matter() -> None:
    image_counts = RNG.integers(0, 50, (3, 2, 6))
    counts = image_counts + RNG.integers(1, 50, image_counts.shape)
    order = RNG.permutation(6)
    whole = modality_separation(counts, image_counts, 2)
    np.testing.assert_allclose(modality_separation(counts[..., order], image_counts[..., order], 2), whole)
    np.testing.assert_array_equal(modality_separation(counts[1], image_counts[1], 2), whole[1])
    np.testing.assert_array_equal(
        specialization(counts, image_counts, 2)[2], specialization(counts[2], image_counts[2], 2)
    )


def test_random_routes_show_little_and_real_ones_much() -> None:
    """With 128 experts and few tokens the uncorrected number is far from 0; the corrected one is near it."""
    rng = np.random.default_rng(5)
    raw, corrected = [], []
    for _ in range(20):
        routes = random_routes(512, 128, 8, rng)
        counts, found = routes.sum(0)[None], routes[rng.permutation(512)[:128]].sum(0)[None]
        raw.append(float(raw_separation(counts[0], found[0])) ** 0.5)
        corrected.append(float(modality_separation(counts, found, 8)[0]))
    assert np.mean(raw) > 0.12
    assert np.mean(corrected) < 0.03
    # A router that prefers one half of the experts for images: as far apart as its probabilities say.
    leaning = np.where(np.arange(512)[:, None] < 256, np.arange(128) < 64, np.arange(128) >= 64) * 0.5 + 0.25
    routes = np.zeros((512, 128), dtype=np.int64)
    np.put_along_axis(routes, np.argsort(-rng.random((512, 128)) * leaning, 1)[:, :1], 1, 1)
    share = routes[:256, :64].sum() / 256
    found = modality_separation(routes.sum(0)[None], routes[:256].sum(0)[None], 1)[0]
    assert found == pytest.approx(2 * share - 1, abs=0.08)


def test_one_modality_or_no_load_has_no_number() -> None:
    counts = np.array([[4, 2, 0], [0, 0, 0], [3, 3, 3]])
    image_counts = np.array([[4, 2, 0], [0, 0, 0], [0, 0, 0]])
    assert np.isnan(modality_separation(counts, image_counts, 1)).all()
    assert np.isnan(specialization(counts, image_counts, 1)).all()


def test_too_few_tokens_show_nothing() -> None:
    """Two tokens, an expert each: all permutations look the same."""
    assert modality_separation(np.array([[1, 1]]), np.array([[1, 0]]), 1)[0] == 0
    assert specialization(np.array([[1, 1]]), np.array([[1, 0]]), 1).tolist() == [[0, 0]]


def test_capacity_that_dropped_assignments_leaves_numbers_finite() -> None:
    """With dropped assignments the number of tokens is less than the busiest expert's."""
    counts, image_counts = np.array([[8, 1, 1]]), np.array([[6, 0, 1]])
    for topk in (2, 3, None):
        assert 0 <= modality_separation(counts, image_counts, topk)[0] <= 1
        assert (np.abs(specialization(counts, image_counts, topk)) <= 1).all()


def test_overlap_by_hand() -> None:
    # Loads of images 3/4, 1/4, 0 and of text 1/2, 0, 1/2: they have half of one expert in common.
    counts, image_counts = np.array([[5, 1, 2], [4, 4, 0], [3, 3, 0]]), np.array([[3, 1, 0], [2, 2, 0], [3, 3, 0]])
    found = modality_overlap(np.stack([counts, 3 * counts]), np.stack([image_counts, 3 * image_counts]))
    np.testing.assert_allclose(found, np.tile([0.5, 1, np.nan], (2, 1)))


def load_of(counts: list[list[int]], image_counts: list[list[int]] | None, topk: int = 1) -> ExpertLoad:
    images = None if image_counts is None else torch.tensor(image_counts)
    return ExpertLoad(tuple(range(2, 2 + len(counts))), torch.tensor(counts), images, topk)


def test_metrics_by_hand() -> None:
    metrics = modality_metrics(load_of([[10, 10, 4], [12, 6, 6]], [[6, 6, 0], [12, 0, 0]]), detailed=True)
    assert metrics["image/token_share"] == 0.5
    # Layer 2: images 6, 6, 0 of a fair share of 4; text 4, 4, 4.
    # Layer 3: images on the first expert, text on the others.
    assert metrics["layer_2/image_max_violation"] == pytest.approx(0.5)
    assert metrics["layer_2/text_max_violation"] == 0
    assert metrics["layer_2/image_dead_expert_frac"] == pytest.approx(1 / 3)
    assert metrics["layer_2/image_expert_diversity"] == pytest.approx(2 / 3)
    assert metrics["layer_2/text_expert_diversity"] == pytest.approx(1)
    assert metrics["image/max_violation_mean"] == pytest.approx((0.5 + 2) / 2)
    assert metrics["text/max_violation_mean"] == pytest.approx((0 + 0.5) / 2)
    assert metrics["layer_3/modality_separation"] == metrics["modality_separation_max"] == 1
    assert metrics["modality_separation_mean"] == (1 + metrics["layer_2/modality_separation"]) / 2
    assert "layer_0/modality_separation" not in metrics
    # Layer 2: min(1/2, 1/3) twice, and min(0, 1/3); layer 3 shares no expert.
    assert metrics["layer_2/modality_overlap"] == pytest.approx(2 / 3)
    assert metrics["layer_3/modality_overlap"] == 0
    assert metrics["modality_overlap_mean"] == pytest.approx(1 / 3)


def test_brief_metrics_are_ten_keys_and_none_where_there_is_nothing_to_compare() -> None:
    brief = modality_metrics(load_of([[10, 10, 4]], [[6, 6, 0]]))
    assert sorted(brief) == sorted(
        [
            "image/token_share",
            *(f"{kind}/{name}_mean" for kind in ("image", "text") for name in _NAMES),
            "modality_separation_mean",
            "modality_separation_max",
            "modality_overlap_mean",
        ]
    )
    assert modality_metrics(load_of([[10, 10, 4]], None)) == {}
    assert modality_metrics(load_of([[10, 10, 4]], [[0, 0, 0]])) == {"image/token_share": 0}
    assert modality_metrics(load_of([[10, 10, 4]], [[10, 10, 4]])) == {"image/token_share": 1}
    assert modality_metrics(load_of([[0, 0, 0]], [[0, 0, 0]])) == {"image/token_share": 0}
