# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""RMSNorm over all query heads together and over all key heads together (OLMoE), also with tensor parallelism."""

import dataclasses
from typing import Any

import torch
from jaxtyping import Float
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class AllHeadsNorm(torch.nn.Module):
    """RMSNorm over the heads of all tensor-parallel ranks.

    Every rank has the weights of all heads, because Megatron-Core treats query and key norms as replicas and sums their
    gradients over the ranks. A rank uses only the weights of its heads.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, *, num_heads: int, **_others: Any):
        super().__init__()
        self.eps = eps
        self.num_shards = config.tensor_model_parallel_size
        self.weight = torch.nn.Parameter(torch.ones(num_heads * hidden_size, dtype=config.params_dtype))

    def forward(self, heads: Float[Tensor, "sequence batch heads dim"]) -> Float[Tensor, "sequence batch heads dim"]:
        values, weight = heads.flatten(2).float(), self.weight
        squares = values.pow(2).sum(-1, keepdim=True)
        if self.num_shards > 1:
            # The heads of all ranks use the sum of squares, so its gradient is summed over the ranks too.
            squares = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(squares))
            weight = weight.chunk(self.num_shards)[parallel_state.get_tensor_model_parallel_rank()]
        normalized = values * torch.rsqrt(squares / len(self.weight) + self.eps)
        return (weight * normalized.to(heads.dtype)).view_as(heads)


class AllQueriesNorm(AllHeadsNorm):
    """Norm of all query heads, with Megatron-Core's arguments."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **others: Any):
        super().__init__(config, hidden_size, eps, num_heads=config.num_attention_heads, **others)


class AllKeysNorm(AllHeadsNorm):
    """Norm of all key heads, with Megatron-Core's arguments."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **others: Any):
        super().__init__(config, hidden_size, eps, num_heads=config.num_query_groups, **others)


def normalize_all_heads(block: TransformerBlockSubmodules) -> TransformerBlockSubmodules:
    """Return a copy of a block's layer specs with norms over all heads instead of a norm for each head."""
    return dataclasses.replace(block, layer_specs=[_with_norms(layer) for layer in block.layer_specs])


def _with_norms(layer_spec: ModuleSpec) -> ModuleSpec:
    attention = layer_spec.submodules.self_attention
    submodules = dataclasses.replace(attention.submodules, q_layernorm=AllQueriesNorm, k_layernorm=AllKeysNorm)
    self_attention = dataclasses.replace(attention, submodules=submodules)
    layer = dataclasses.replace(layer_spec.submodules, self_attention=self_attention)
    return dataclasses.replace(layer_spec, submodules=layer)
