# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Random weights that depend on the seed and the parameter's name alone, never on the layout."""

import math
import zlib
from collections.abc import Sequence
from typing import Any

import torch

from nemo_rl_moe.models.megatron.parameter_layout import ParameterPiece, parameter_pieces

# isort: split
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

# Projections back into the residual stream start smaller by sqrt(2 x layers), as in GPT-2 (Radford et al. 2019, 2.3).
_RESIDUAL_OUTPUTS = ("self_attention.linear_proj.weight", "linear_fc2.weight")


def initialize_weights(chunks: Sequence[GPTModel], config: TransformerConfig, hf_config: Any, seed: int) -> None:
    """Fills every parameter: norms with 1, biases with 0, the rest from a normal distribution of `init_method_std`."""
    with torch.no_grad():
        for piece in parameter_pieces(chunks, config):
            piece.local.copy_(piece.slice_of(_full_tensor(piece, config, hf_config, seed)))


def _full_tensor(piece: ParameterPiece, config: TransformerConfig, hf_config: Any, seed: int) -> torch.Tensor:
    if piece.name.endswith("layernorm.weight"):
        return torch.ones(piece.full_shape())
    if piece.name.endswith("bias"):
        return torch.zeros(piece.full_shape())
    scale = 1 / math.sqrt(2 * config.num_layers) if piece.name.endswith(_RESIDUAL_OUTPUTS) else 1.0
    # Of tied embeddings the last pipeline stage has a copy, which must start as the first stage's.
    tied = hf_config.tie_word_embeddings and piece.is_vocabulary
    name = "embedding.word_embeddings.weight" if tied else piece.name
    generator = torch.Generator().manual_seed((seed << 32) ^ zlib.crc32(name.encode()))
    shape = list(piece.full_shape())
    if piece.is_vocabulary:
        # Padding depends on the layout, so it is added after the draw.
        shape[0] = hf_config.vocab_size
    drawn = torch.randn(shape, generator=generator) * (config.init_method_std * scale)
    return piece.pad_vocabulary(drawn)
