# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""pass@k against the thing it stands for: every way to take k of n responses."""

from itertools import combinations

import pytest
import torch

from nemo_rl_moe.algorithms.grpo_metrics import pass_at_k, pass_at_k_metrics


@pytest.mark.parametrize("n", range(1, 8))
def test_equals_the_share_of_the_subsets_that_hold_a_right_one(n: int) -> None:
    counts = torch.arange(n + 1)
    for k in range(1, n + 1):
        subsets = list(combinations(range(n), k))
        # Of n responses, let the first c be right.
        brute = [sum(min(subset) < c for subset in subsets) / len(subsets) for c in counts.tolist()]
        assert pass_at_k(counts, n, k).tolist() == pytest.approx(brute, abs=1e-15)


def test_many_generations_stay_exact() -> None:
    # 1 - C(1000, 512) / C(1024, 512), by its product.
    product = 1.0
    for i in range(24):
        product *= (512 - i) / (1024 - i)
    assert pass_at_k(torch.tensor([24]), 1024, 512).item() == pytest.approx(1 - product, rel=1e-15)


@pytest.mark.parametrize("k", [0, 5])
def test_k_out_of_range(k: int) -> None:
    with pytest.raises(ValueError, match="from 1 to the number of generations"):
        pass_at_k(torch.tensor([1]), 4, k)


@pytest.mark.parametrize(
    ("generations", "keys"),
    [
        (1, []),
        (2, ["pass_at_2"]),
        (3, ["pass_at_2", "pass_at_3"]),
        (4, ["pass_at_2", "pass_at_4"]),
        (7, ["pass_at_2", "pass_at_4", "pass_at_7"]),
        (16, ["pass_at_2", "pass_at_4", "pass_at_8", "pass_at_16"]),
    ],
)
def test_which_k_are_reported(generations: int, keys: list[str]) -> None:
    assert list(pass_at_k_metrics(torch.zeros(3, generations, dtype=torch.bool))) == keys


def test_metrics_are_means_over_prompts() -> None:
    is_correct = torch.tensor([[True, False, False, False], [False] * 4, [True] * 4, [False, True, True, False]])
    # With 1, 0, 4 and 2 right: of the six pairs 3, 0, 6 and 5 hold a right one.
    assert pass_at_k_metrics(is_correct) == pytest.approx({"pass_at_2": 14 / 24, "pass_at_4": 3 / 4}, rel=1e-15)
