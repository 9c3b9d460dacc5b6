# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Norms, cosines and shares of a gradient's parts, against torch's own functions on the parts themselves."""

import pytest
import torch
from torch.nn.functional import cosine_similarity

from nemo_rl_moe.routing.metrics.gradient_sources import AUXILIARY, POLICY, Z, gradient_metrics, inner_products

NAMES = (POLICY, AUXILIARY, Z)
LAYERS = (1, 3)


@pytest.fixture
def parts() -> torch.Tensor:
    """Return the parts of two layers, in float32."""
    return torch.randn(3, 2, 12, generator=torch.Generator().manual_seed(1))


def test_metrics_are_those_of_the_parts(parts: torch.Tensor) -> None:
    metrics = gradient_metrics(inner_products(parts), NAMES, LAYERS, per_layer=True)
    exact = parts.double()
    whole = exact.flatten(1).sum(0)
    expected = {}
    for ending, found in (("", exact.flatten(1)), ("_layer_1", exact[:, 0]), ("_layer_3", exact[:, 1])):
        for name, part in zip(NAMES, found, strict=True):
            expected[f"router_gradient/norm_{name}{ending}"] = float(part.norm())
            if name != POLICY:
                expected[f"router_gradient/cosine_policy_{name}{ending}"] = float(cosine_similarity(found[0], part, 0))
    for name, part in zip(NAMES, exact.flatten(1), strict=True):
        expected[f"router_gradient/share_{name}"] = float(part @ whole / (whole @ whole))
    assert metrics == pytest.approx(expected, rel=1e-12)
    assert sum(metrics[f"router_gradient/share_{name}"] for name in NAMES) == pytest.approx(1)


def test_without_layers_the_number_of_keys_is_bounded(parts: torch.Tensor) -> None:
    metrics = gradient_metrics(inner_products(parts), NAMES, LAYERS, per_layer=False)
    assert len(metrics) == 3 + 2 + 3
    assert not any("layer" in name for name in metrics)


def test_a_part_that_is_zero_has_no_direction(parts: torch.Tensor) -> None:
    parts[1] = 0
    metrics = gradient_metrics(inner_products(parts), NAMES, LAYERS, per_layer=False)
    assert metrics["router_gradient/norm_aux"] == metrics["router_gradient/share_aux"] == 0
    assert "router_gradient/cosine_policy_aux" not in metrics
    assert "router_gradient/cosine_policy_z" in metrics


def test_no_gradient_has_no_shares() -> None:
    metrics = gradient_metrics(inner_products(torch.zeros(1, 2, 3)), (POLICY,), LAYERS, per_layer=False)
    assert metrics == {"router_gradient/norm_policy": 0}
