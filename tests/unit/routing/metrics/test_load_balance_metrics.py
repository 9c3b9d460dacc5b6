# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_rl_moe.routing.metrics.load_balance_metrics import (
    compute_brief_metrics,
    compute_detailed_metrics,
    load_balance_metrics,
)
from nemo_rl_moe.routing.metrics.load_statistics import ExpertLoad, LayerLoad
from nemo_rl_moe.routing.metrics.metric_keys import OUTLIER_PREFIX


def matrix_metrics(counts: Tensor, layers: Sequence[int], **options: Any) -> dict[str, float]:
    return load_balance_metrics(ExpertLoad(tuple(layers), counts), **options)


def layer_load(counts: Sequence[float] | Tensor, aux_loss: float | None = None, topk: int | None = None) -> LayerLoad:
    loss = None if aux_loss is None else torch.tensor(aux_loss, dtype=torch.float64)
    return {"expert_load": torch.as_tensor(counts), "aux_loss": loss, "n_experts": len(counts), "topk": topk}


def by_definition(
    loads: Mapping[int, Sequence[int]], top_k: int, router_topk: int | None, aux_losses: Mapping[int, float]
) -> dict[str, float]:
    """Every detailed key, one plain Python loop at a time."""
    cv, null, excess, violation, dead, diversity, means, entries = {}, {}, {}, {}, {}, {}, {}, []
    for i, counts in loads.items():
        experts, total = len(counts), sum(counts)
        utilization = [experts * c / total if total else 0.0 for c in counts]
        entries += [(u, i, e) for e, u in enumerate(utilization)]
        cv[i] = statistics.stdev(counts) / statistics.mean(counts) if total and experts > 1 else 0.0
        violation[i] = max(utilization) - 1 if total else 0.0
        dead[i] = sum(1 for c in counts if c == 0) / experts
        shares = [c / total for c in counts if c]
        diversity[i] = math.exp(-sum(p * math.log(p) for p in shares)) / experts if total else 0.0
        means[i] = sum(utilization) / experts
        if router_topk is not None:
            tokens = total / router_topk
            null[i] = math.sqrt((1 - router_topk / experts) * experts / (tokens * router_topk)) if total else 0.0
            excess[i] = math.sqrt(max(0.0, cv[i] ** 2 - null[i] ** 2))
    entries.sort()
    values = [u for u, _, _ in entries]
    n = len(values)
    result = {
        "cv_mean": statistics.mean(cv.values()),
        "cv_median": statistics.median(cv.values()),
        "cv_min": min(cv.values()),
        "cv_max": max(cv.values()),
        "expert_utilization_min": values[0],
        "expert_utilization_p25": values[n // 4],
        "expert_utilization_median": statistics.median(values),
        "expert_utilization_p75": values[3 * n // 4],
        "expert_utilization_max": values[-1],
        "max_violation_mean": statistics.mean(violation.values()),
        "max_violation_max": max(violation.values()),
        "dead_expert_frac_mean": statistics.mean(dead.values()),
        "expert_diversity_mean": statistics.mean(diversity.values()),
        "expert_diversity_min": min(diversity.values()),
    }
    if router_topk is not None:
        result["cv_null_mean"] = statistics.mean(null.values())
        result["cv_excess_mean"] = statistics.mean(excess.values())
    if aux_losses:
        result["aux_loss_mean"] = statistics.mean(aux_losses.values())
    for u, i, e in (entries[:top_k] + entries[-top_k:]) if top_k else []:
        result[f"moe_expert_utilization/layer_{i}_expert_{e}"] = u
    for i in loads:
        result[f"layer_{i}/cv"] = cv[i]
        result[f"layer_{i}/utilization_mean"] = means[i]
        result[f"layer_{i}/dead_expert_frac"] = dead[i]
        result[f"layer_{i}/expert_diversity"] = diversity[i]
        result[f"layer_{i}/max_violation"] = violation[i]
        if i in aux_losses:
            result[f"layer_{i}/aux_loss"] = aux_losses[i]
    return result


def random_loads(layers: Sequence[int], experts: Sequence[int], seed: int) -> dict[int, list[int]]:
    generator = torch.Generator().manual_seed(seed)
    # Squared, so that some experts are dead and some are hot.
    return {
        i: torch.randint(0, 12, (e,), generator=generator).square().tolist()
        for i, e in zip(layers, experts, strict=True)
    }


@pytest.mark.parametrize("experts", [[8, 8, 8, 8], [4, 16, 1, 16], [5, 3, 3, 7]], ids=str)
@pytest.mark.parametrize("router_topk", [None, 1])
def test_every_key_is_what_its_definition_says(experts: list[int], router_topk: int | None) -> None:
    loads = random_loads([0, 3, 4, 17], experts, seed=1)
    loads[3] = [0] * experts[1]
    aux_losses = {0: 1.25, 17: 1.5}
    layer_loads = {i: layer_load(counts, aux_losses.get(i), router_topk) for i, counts in loads.items()}
    expected = by_definition(loads, 3, router_topk, aux_losses)
    measured = compute_detailed_metrics(layer_loads, top_k=3)
    assert measured == pytest.approx(expected, rel=1e-12, abs=1e-12)
    brief = compute_brief_metrics(layer_loads, top_k=3)
    assert brief == {key: value for key, value in measured.items() if not key.startswith("layer_")}


def test_hand_worked_values() -> None:
    # Two layers, four experts; the second one has all its tokens on one expert.
    metrics = matrix_metrics(
        torch.tensor([[2, 4, 4, 6], [0, 16, 0, 0]]), [1, 2], router_topk=2, aux_losses=[1.0, None], detailed=True
    )
    # Deviations of -2, 0, 0, 2 from 4: variance 8 / 3. Null variance: (1 - 2/4) * 4 / 16.
    cv = math.sqrt(8 / 3) / 4
    assert metrics["layer_1/cv"] == pytest.approx(cv)
    # Deviations of -4, 12, -4, -4 from 4: variance 192 / 3 = 8 * 8.
    assert metrics["layer_2/cv"] == 2.0
    assert metrics["cv_null_mean"] == pytest.approx(math.sqrt(1 / 8))
    assert metrics["cv_excess_mean"] == pytest.approx((math.sqrt(cv**2 - 1 / 8) + math.sqrt(4 - 1 / 8)) / 2)
    assert (metrics["layer_1/max_violation"], metrics["layer_2/max_violation"]) == (0.5, 3.0)
    assert (metrics["layer_1/dead_expert_frac"], metrics["layer_2/dead_expert_frac"]) == (0.0, 0.75)
    assert metrics["layer_2/expert_diversity"] == 0.25
    # Sorted utilizations: 0, 0, 0, 0.5, 1, 1, 1.5, 4.
    quantiles = [metrics[f"expert_utilization_{name}"] for name in ("min", "p25", "median", "p75", "max")]
    assert quantiles == [0.0, 0.0, 0.75, 1.5, 4.0]
    assert metrics["aux_loss_mean"] == metrics["layer_1/aux_loss"] == 1.0
    assert "layer_2/aux_loss" not in metrics


def test_matrix_and_mapping_agree_in_any_order_of_layers() -> None:
    loads = random_loads([0, 3, 4, 17], [8] * 4, seed=2)
    expected = compute_detailed_metrics({i: layer_load(c, float(i), 2) for i, c in loads.items()})
    order = [17, 0, 4, 3]
    shuffled = compute_detailed_metrics({i: layer_load(loads[i], float(i), 2) for i in order})
    matrix = matrix_metrics(
        torch.tensor([loads[i] for i in order]),
        order,
        router_topk=2,
        aux_losses=[float(i) for i in order],
        detailed=True,
    )
    assert shuffled == expected
    assert matrix == expected


def test_names_give_the_number_in_them() -> None:
    metrics = compute_detailed_metrics(
        {f"model.layers.{i}.mlp.gate": layer_load([i, 1]) for i in (10, 2)}, top_k=1, router_topk=1
    )
    assert metrics["layer_10/max_violation"] == pytest.approx(20 / 11 - 1)
    assert metrics["layer_2/max_violation"] == pytest.approx(4 / 3 - 1)
    assert metrics["moe_expert_utilization/layer_10_expert_0"] == pytest.approx(20 / 11)
    assert "cv_null_mean" in metrics


def test_noise_keys_need_the_topk_of_every_layer() -> None:
    loads = {0: layer_load([3, 1], topk=1), 1: layer_load([1, 3])}
    assert "cv_null_mean" not in compute_brief_metrics(loads)
    assert "cv_excess_mean" not in compute_brief_metrics(loads)
    assert "cv_null_mean" in compute_brief_metrics(loads, router_topk=1)


def test_an_entry_without_topk_is_accepted() -> None:
    load: LayerLoad = {"expert_load": torch.tensor([3.0, 1.0]), "aux_loss": None, "n_experts": 2}
    assert compute_brief_metrics({0: load})["max_violation_max"] == 0.5


def test_a_wrong_number_of_experts_is_an_error_that_names_the_layer() -> None:
    load = layer_load([1, 2, 3])
    load["n_experts"] = 4
    with pytest.raises(ValueError, match="layer 7: expert_load has 3 entries, n_experts is 4"):
        compute_brief_metrics({7: load})


def test_no_layers_no_keys() -> None:
    assert compute_detailed_metrics({}) == {}
    assert matrix_metrics(torch.zeros(0, 4), []) == {}


def test_no_tokens_at_all() -> None:
    metrics = matrix_metrics(torch.zeros(3, 4), [0, 1, 2], router_topk=2, detailed=True)
    dead = {key for key, value in metrics.items() if value == 1.0}
    assert dead == {"dead_expert_frac_mean", *(f"layer_{i}/dead_expert_frac" for i in range(3))}
    # Exactly zero, not minus zero, which would print oddly.
    assert all(math.copysign(1.0, value) == 1.0 and value == 0.0 for key, value in metrics.items() if key not in dead)


@pytest.mark.parametrize(("top_k", "number"), [(0, 0), (1, 2), (3, 6), (4, 6), (100, 6)])
def test_number_of_outliers(top_k: int, number: int) -> None:
    metrics = compute_brief_metrics({0: layer_load([1, 2, 3]), 4: layer_load([1, 2, 3])}, top_k=top_k)
    assert sum(key.startswith(OUTLIER_PREFIX) for key in metrics) == number


def test_tied_outliers_are_the_ends_of_the_order_of_value_layer_and_expert() -> None:
    metrics = matrix_metrics(torch.ones(2, 4), [9, 2], top_k_experts=2)
    outliers = {key.removeprefix(OUTLIER_PREFIX) for key in metrics if key.startswith(OUTLIER_PREFIX)}
    assert outliers == {"layer_2_expert_0", "layer_2_expert_1", "layer_9_expert_2", "layer_9_expert_3"}


@pytest.mark.parametrize(("layers", "experts"), [(1, 1), (4, 8), (61, 256), (100, 1024)])
def test_brief_mode_is_bounded(layers: int, experts: int) -> None:
    loads = {i: layer_load(torch.arange(experts) + i, 1.0, topk=1) for i in range(layers)}
    brief, detailed = compute_brief_metrics(loads), compute_detailed_metrics(loads)
    assert len(brief) <= 60
    assert len(detailed) == len(brief) + 6 * layers
    assert all(type(value) is float for value in detailed.values())


@pytest.mark.parametrize(("experts", "topk", "tokens"), [(64, 8, 256), (128, 8, 1024), (32, 1, 512)])
def test_cv_null_is_the_cv_of_random_routing(experts: int, topk: int, tokens: int) -> None:
    draws = 60
    scores = torch.rand(draws, tokens, experts, generator=torch.Generator().manual_seed(experts))
    counts = torch.zeros(draws, experts).scatter_add_(
        1, scores.topk(topk).indices.flatten(1), torch.ones(draws, tokens * topk)
    )
    metrics = matrix_metrics(counts, range(draws), router_topk=topk, detailed=True)
    root_mean_square = math.sqrt(statistics.mean(metrics[f"layer_{i}/cv"] ** 2 for i in range(draws)))
    # The variance of 60 draws of E - 1 degrees of freedom each is within 5 % (32 experts: 3.3 standard deviations of
    # its root); the definition leaves out the factor sqrt(E / (E - 1)), up to 1.6 %.
    assert metrics["cv_null_mean"] == pytest.approx(root_mean_square, rel=0.06)
    assert metrics["cv_excess_mean"] < 0.35 * root_mean_square


def test_loss_on_the_graph_and_integer_or_float_loads() -> None:
    loss = torch.tensor(1.5, requires_grad=True) * 2
    metrics = compute_brief_metrics({0: {"expert_load": torch.tensor([1.5, 0.5]), "aux_loss": loss, "n_experts": 2}})
    assert metrics["aux_loss_mean"] == 3.0
    assert metrics["expert_utilization_max"] == 1.5


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.float32])
def test_counts_in_few_bits_do_not_overflow(dtype: torch.dtype) -> None:
    count = 1000 if dtype == torch.int16 else 20_000_000
    load = ExpertLoad((0,), torch.full((1, 128), count, dtype=dtype))
    metrics = load_balance_metrics(load, router_topk=2)
    assert (metrics["cv_mean"], metrics["expert_diversity_mean"]) == pytest.approx((0.0, 1.0))
