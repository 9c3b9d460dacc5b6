# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Gradient of the routers by source: lengths of the parts, and whether their directions agree.

All metrics follow from the parts' inner products in each layer, so nothing else needs to leave the device.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from nemo_rl_moe.shapes import Float

POLICY, AUXILIARY, Z = "policy", "aux", "z"
"""Sources of the gradient: the algorithm's loss, all load balancing losses together, the z-loss."""


def inner_products(parts: Float[Tensor, "parts layers weights"]) -> Float[Tensor, "layers parts parts"]:
    # One layer at a time: a copy of all layers in float64 would be twice the gradients' memory.
    of_layers = [parts[:, layer].double() for layer in range(parts.shape[1])]
    return torch.stack([part @ part.T for part in of_layers])


def gradient_metrics(
    products: Float[Tensor, "layers parts parts"], names: Sequence[str], layers: Sequence[int], *, per_layer: bool
) -> dict[str, float]:
    """Return metrics of how the sources of a router's gradient share it, under `router_gradient/`.

    The gradient `g` is the sum of the parts `g_p`. `norm_{p}` is `|g_p|`. `share_{p}` is `<g_p, g> / <g, g>`, the
    part's contribution along the gradient: shares add up to 1, and a part that opposes the others is negative.
    `cosine_policy_{p}` is `<g_policy, g_p> / (|g_policy| |g_p|)`. Shares and cosines of a zero gradient are omitted.
    """
    whole = products.sum(0)
    metrics = _norms_and_cosines(whole, names, "")
    if total := float(whole.sum()):
        metrics |= {f"share_{name}": float(row.sum()) / total for name, row in zip(names, whole, strict=True)}
    if per_layer:
        for layer, of_layer in zip(layers, products, strict=True):
            metrics |= _norms_and_cosines(of_layer, names, f"_layer_{layer}")
    return {f"router_gradient/{name}": value for name, value in metrics.items()}


def agreement_metrics(
    name: str, found: Float[Tensor, "experts hidden"], expected: Float[Tensor, "experts hidden"], floor: float = 0.0
) -> dict[str, float]:
    """Return how a router's gradient of one source agrees with the equation of its loss.

    `scale_{name}` is `<found, expected> / <expected, expected>`: 0.5 if the loss acts with half its coefficient.
    `error_{name}` is `|found - expected| / |expected|`. It is also large if padding tokens count in the loss. The
    result is empty if the length of the expected gradient is at most `floor`.
    """
    length = float(expected.double().square().sum())
    if length <= floor**2:
        return {}
    scale = float((found.double() * expected.double()).sum()) / length
    error = float((found.double() - expected.double()).square().sum())
    return {f"router_gradient/scale_{name}": scale, f"router_gradient/error_{name}": (error / length) ** 0.5}


def _norms_and_cosines(products: Float[Tensor, "parts parts"], names: Sequence[str], ending: str) -> dict[str, float]:
    norms = products.diagonal().sqrt().tolist()
    metrics = {f"norm_{name}{ending}": norm for name, norm in zip(names, norms, strict=True)}
    for position, name in enumerate(names[1:], start=1):
        if lengths := norms[0] * norms[position]:
            metrics[f"cosine_{names[0]}_{name}{ending}"] = float(products[0, position]) / lengths
    return metrics
