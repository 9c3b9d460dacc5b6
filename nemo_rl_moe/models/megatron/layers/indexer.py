# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Indexers of sparse attention: their weights, and their queries, keys and weights of heads.

The weights are not trained: they are loaded, saved and exported as buffers. In runs whose sequences are no longer than
`index_topk` they are not used, because the indexer would choose all tokens.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from nemo_rl_moe.models.families import family_of

NORM_EPS = 1e-6
"""Epsilon of the keys' norm, in the published code and in transformers."""


class KeptTensors(nn.Module):
    """Weights without gradient: buffers under the names of a layer's parameters."""

    weight: Tensor
    bias: Tensor

    def __init__(self, dtype: torch.dtype, **shapes: tuple[int, ...]):
        super().__init__()
        for name, shape in shapes.items():
            self.register_buffer(name, torch.empty(shape, dtype=dtype))


class Indexed(NamedTuple):
    """What an indexer computes for tokens. `key_choice` makes a choice of it."""

    query: Float[Tensor, "tokens rows heads dim"]
    key: Float[Tensor, "tokens rows dim"]
    weights: Float[Tensor, "tokens rows heads"]


class Indexer(nn.Module):
    """One layer's indexer, replicated on every rank.

    The norm and the weights of the heads are in float32, as in the published code. That code also rotates queries and
    keys by a Hadamard matrix and rounds them to 8 bits. The rotation changes no product, and the rounding is left out,
    as in transformers.

    Args:
        rotates_pairs: Whether rotary embedding applies to pairs of neighbouring entries (GLM-5), not to halves.
    """

    def __init__(self, hf_config: Any, dtype: torch.dtype, *, rotates_pairs: bool = False):
        super().__init__()
        heads, dim, hidden = hf_config.index_n_heads, hf_config.index_head_dim, hf_config.hidden_size
        self.heads, self.dim, self.rotates_pairs = heads, dim, rotates_pairs
        self.wq_b = KeptTensors(dtype, weight=(heads * dim, hf_config.q_lora_rank))
        self.wk = KeptTensors(dtype, weight=(dim, hidden))
        self.k_norm = KeptTensors(torch.float32, weight=(dim,), bias=(dim,))
        self.weights_proj = KeptTensors(torch.float32, weight=(heads, hidden))

    def forward(
        self,
        hidden_states: Float[Tensor, "tokens rows hidden"],
        latent: Float[Tensor, "tokens rows latent"],
        cosines: Float[Tensor, "tokens rows_or_1 rotated"],
        sines: Float[Tensor, "tokens rows_or_1 rotated"],
    ) -> Indexed:
        """Return the tokens' queries, keys and weights of heads.

        Args:
            latent: The normalised latent of the attention's queries.
            cosines: Of the rotary angles of the tokens' positions, as for halves.
        """
        query = F.linear(latent, self.wq_b.weight).unflatten(-1, (self.heads, self.dim))
        key = F.linear(hidden_states, self.wk.weight)
        key = F.layer_norm(key.float(), (self.dim,), self.k_norm.weight, self.k_norm.bias, NORM_EPS).to(key.dtype)
        weights = F.linear(hidden_states.float(), self.weights_proj.weight) * (self.heads * self.dim) ** -0.5
        query = self._rotated(query, cosines.unsqueeze(2), sines.unsqueeze(2))
        return Indexed(query, self._rotated(key, cosines, sines), weights)

    def _rotated(self, heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """Rotate the first entries of each head. Pairs become halves, which changes no product of two heads."""
        rotated = cosines.shape[-1]
        turned, others = heads[..., :rotated], heads[..., rotated:]
        if self.rotates_pairs:
            turned = torch.cat([turned[..., 0::2], turned[..., 1::2]], -1)
        first, second = turned.chunk(2, -1)
        turned = turned * cosines.to(turned.dtype) + torch.cat([-second, first], -1) * sines.to(turned.dtype)
        return torch.cat([turned, others], -1)


def indexer_parameters(hf_config: Any) -> int:
    """Return the number of weights of one layer's indexer."""
    with torch.device("meta"):
        return sum(tensor.numel() for tensor in Indexer(hf_config, torch.float32).buffers())


def add_indexers(chunk: GPTModel, hf_config: Any) -> None:
    """Add an indexer to each layer of a chunk that has one."""
    family = family_of(hf_config)
    indexed = family.indexed_layers(hf_config)
    for layer in chunk.decoder.layers:
        if layer.layer_number - 1 in indexed:
            layer.self_attention.indexer = Indexer(
                hf_config, chunk.config.params_dtype, rotates_pairs=family.indexer_rotates_pairs
            )
