# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention, and a split along an axis."""

from typing import Any

import torch
from torch import Tensor

from transformer_engine.pytorch.attention.dot_product_attention import DotProductAttention


class _SplitAlongDim:
    """Pieces of a tensor; in Transformer Engine their gradients lie side by side in memory."""

    @staticmethod
    def apply(mixed: Tensor, dimension: int, sizes: Any, squeeze: bool = False) -> tuple[Tensor, ...]:
        pieces = torch.split(mixed, sizes, dim=dimension)
        return tuple(piece.squeeze(dimension) for piece in pieces) if squeeze else pieces


__all__ = ["DotProductAttention", "_SplitAlongDim"]
