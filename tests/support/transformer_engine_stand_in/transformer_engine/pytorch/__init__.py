# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The modules that Megatron-Core builds its layers of."""

from torch import nn

from transformer_engine.pytorch import attention, distributed, fp8, optimizers, permutation, router, tensor
from transformer_engine.pytorch.attention import DotProductAttention
from transformer_engine.pytorch.fp8 import fp8_autocast, fp8_model_init
from transformer_engine.pytorch.module.base import GroupedLinear, LayerNorm, LayerNormLinear, Linear, RMSNorm

__all__ = [
    "DotProductAttention",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "Linear",
    "RMSNorm",
    "attention",
    "distributed",
    "fp8",
    "fp8_autocast",
    "fp8_model_init",
    "ops",
    "optimizers",
    "permutation",
    "router",
    "tensor",
]


class ops:
    """Fusible operations, which Megatron-Core names in annotations."""

    class FusibleOperation(nn.Module):
        """Never made."""

    class Sequential(nn.Sequential):
        """Never made."""
