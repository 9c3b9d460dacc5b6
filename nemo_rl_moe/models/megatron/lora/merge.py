# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Merging of a model's adapters into its weights."""

from collections.abc import Sequence

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_rl_moe.models.megatron.lora.adapter import Adapter, adapters_in
from nemo_rl_moe.models.megatron.weights.parameter_layout import parameter_pieces


@torch.no_grad()
def merge_adapters(chunks: Sequence[GPTModel], config: TransformerConfig) -> None:
    """Add the adapters to the weights, rounding only once, and remove the adapters from the model."""
    for piece in parameter_pieces(chunks, config):
        if piece.adapter is not None:
            piece.local.copy_(piece.merged())
    for adapter in adapters_in(chunks):
        adapter.switch.is_on = False  # the hooks stay but do nothing
    for chunk in chunks:
        for module in list(chunk.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, Adapter):
                    del module._modules[name]
