# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Weights of sparse attention's indexers. They are loaded, saved and exported, but unused in the forward pass."""

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import nn

from nemo_rl_moe.models.families import family_of


class KeptTensors(nn.Module):
    """Weights that are kept but not used: buffers under the names of a layer's parameters."""

    def __init__(self, dtype: torch.dtype, **shapes: tuple[int, ...]):
        super().__init__()
        for name, shape in shapes.items():
            self.register_buffer(name, torch.empty(shape, dtype=dtype))


class Indexer(nn.Module):
    """Weights of one layer's indexer, replicated on every rank.

    The norm and the weights of the heads are in float32, as in the published code.
    """

    def __init__(self, hf_config: Any, dtype: torch.dtype):
        super().__init__()
        heads, dim, hidden = hf_config.index_n_heads, hf_config.index_head_dim, hf_config.hidden_size
        self.wq_b = KeptTensors(dtype, weight=(heads * dim, hf_config.q_lora_rank))
        self.wk = KeptTensors(dtype, weight=(dim, hidden))
        self.k_norm = KeptTensors(torch.float32, weight=(dim,), bias=(dim,))
        self.weights_proj = KeptTensors(torch.float32, weight=(heads, hidden))


def indexer_parameters(hf_config: Any) -> int:
    """Return the number of weights of one layer's indexer."""
    with torch.device("meta"):
        return sum(tensor.numel() for tensor in Indexer(hf_config, torch.float32).buffers())


def add_indexers(chunk: GPTModel, hf_config: Any) -> None:
    """Add the weights of an indexer to each layer of a chunk that has one."""
    indexed = family_of(hf_config).indexed_layers(hf_config)
    for layer in chunk.decoder.layers:
        if layer.layer_number - 1 in indexed:
            layer.self_attention.indexer = Indexer(hf_config, chunk.config.params_dtype)
