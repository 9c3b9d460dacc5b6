# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nemo_rl_moe.routing.metrics.load_balance_metrics import load_balance_metrics
from nemo_rl_moe.routing.metrics.load_statistics import ExpertLoad
from nemo_rl_moe.routing.metrics.metric_keys import OUTLIER_PREFIX
from tests.support.quick_list import examples

QUICK = settings(deadline=None, max_examples=examples(40))


@st.composite
def count_matrices(draw: st.DrawFn) -> Tensor:
    layers, experts = draw(st.integers(1, 6)), draw(st.integers(1, 12))
    entries = st.one_of(st.just(0), st.integers(0, 5), st.integers(0, 10**9))
    rows = st.lists(st.lists(entries, min_size=experts, max_size=experts), min_size=layers, max_size=layers)
    return torch.tensor(draw(rows))


def metrics_of(counts: Tensor, layers: list[int] | None = None, topk: int = 1) -> dict[str, float]:
    indices = layers or list(range(len(counts)))
    return load_balance_metrics(ExpertLoad(tuple(indices), counts), router_topk=topk, detailed=True)


def without_names_of_experts(metrics: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in metrics.items() if not key.startswith(OUTLIER_PREFIX)}


@given(counts=count_matrices())
@QUICK
def test_bounds(counts: Tensor) -> None:
    experts = counts.shape[1]
    metrics = metrics_of(counts)
    assert all(math.isfinite(value) for value in metrics.values())
    for i, row in enumerate(counts):
        loaded = bool(row.sum() > 0)
        assert 0 <= metrics[f"layer_{i}/cv"] <= math.sqrt(experts) * (1 + 1e-12)
        assert 0 <= metrics[f"layer_{i}/max_violation"] <= experts - 1
        assert 0 <= metrics[f"layer_{i}/dead_expert_frac"] <= 1
        assert (1 - 1e-12) / experts * loaded <= metrics[f"layer_{i}/expert_diversity"] <= 1
        assert metrics[f"layer_{i}/utilization_mean"] == pytest.approx(float(loaded))
    quantiles = [metrics[f"expert_utilization_{name}"] for name in ("min", "p25", "median", "p75", "max")]
    assert quantiles == sorted(quantiles)
    assert metrics["cv_min"] <= metrics["cv_median"] <= metrics["cv_max"]
    assert metrics["cv_excess_mean"] <= metrics["cv_mean"] * (1 + 1e-12)


@given(counts=count_matrices(), random=st.randoms(use_true_random=False))
@QUICK
def test_the_order_of_experts_does_not_matter(counts: Tensor, random: object) -> None:
    order = list(range(counts.shape[1]))
    random.shuffle(order)  # type: ignore[attr-defined]
    expected, permuted = (without_names_of_experts(metrics_of(c)) for c in (counts, counts[:, order]))
    assert permuted == pytest.approx(expected, rel=1e-12, abs=1e-12)


@given(counts=count_matrices(), random=st.randoms(use_true_random=False))
@QUICK
def test_the_order_of_layers_changes_no_bit(counts: Tensor, random: object) -> None:
    order = list(range(len(counts)))
    random.shuffle(order)  # type: ignore[attr-defined]
    assert metrics_of(counts[order], order) == metrics_of(counts)


@given(counts=count_matrices(), scale=st.integers(2, 1000))
@QUICK
def test_only_the_noise_depends_on_the_number_of_tokens(counts: Tensor, scale: int) -> None:
    metrics, scaled = metrics_of(counts), metrics_of(counts * scale)
    assert scaled.pop("cv_null_mean") == pytest.approx(metrics.pop("cv_null_mean") / math.sqrt(scale))
    assert scaled.pop("cv_excess_mean") >= metrics.pop("cv_excess_mean") * (1 - 1e-9)
    assert without_names_of_experts(scaled) == pytest.approx(without_names_of_experts(metrics), rel=1e-9, abs=1e-9)


@given(experts=st.integers(2, 40), each=st.integers(1, 10**6), layers=st.integers(1, 4))
@QUICK
def test_balance_is_exact(experts: int, each: int, layers: int) -> None:
    metrics = metrics_of(torch.full((layers, experts), each))
    assert metrics["cv_max"] == metrics["cv_excess_mean"] == metrics["max_violation_max"] == 0.0
    assert metrics["expert_utilization_min"] == metrics["expert_utilization_max"] == 1.0
    assert metrics["expert_diversity_min"] == pytest.approx(1.0, rel=1e-12)
