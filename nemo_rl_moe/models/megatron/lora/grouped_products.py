# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Differentiable products of each expert's rows with its matrix."""

from typing import Any

import torch
from torch import Tensor

from nemo_rl_moe.models.megatron.cpu.moe import ExpertProducts


class _GroupedProduct(torch.autograd.Function):
    """Torch's grouped product with a backward pass that accepts expanded or empty gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, products: ExpertProducts) -> Tensor:
        ctx.save_for_backward(rows, weights)
        ctx.products = products
        return products.with_weights(rows, weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, weights = ctx.saved_tensors
        products: ExpertProducts = ctx.products
        grad = grad.contiguous()
        wants_rows, wants_weights, _ = ctx.needs_input_grad
        grad_rows = products.with_weights(grad, weights.transpose(1, 2)) if wants_rows else None
        return grad_rows, products.of_rows(rows, grad) if wants_weights else None, None


def grouped_product(rows: Tensor, weights: Tensor, products: ExpertProducts) -> Tensor:
    """Multiply each row of `[rows, inner]`, sorted by expert, by its expert's matrix of `[experts, inner, outer]`."""
    product: Tensor = _GroupedProduct.apply(rows, weights, products)
    return product
