# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Choice of cached keys in generation: a cache of an indexer's keys, and the choice that layers share."""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nemo_rl_moe.models.megatron.cpu.attention import causal_mask
from nemo_rl_moe.models.megatron.cpu.cached_attention import PaddedInferenceContext
from nemo_rl_moe.models.megatron.layers.key_choice import choices_of_blocks, positions_of
from nemo_rl_moe.models.megatron.layers.sparse_attention import SparseSelfAttention


class IndexerCache:
    """Cache of the keys of one layer's indexer, and the choice of cached keys by it.

    A layer without an indexer has no keys, and uses the choice of the last layer with one, which the context keeps.
    """

    def __init__(self, attention: SparseSelfAttention, context: PaddedInferenceContext):
        self._attention, self._context = attention, context
        self._indexer, self._topk = attention.indexer, attention.topk
        self._keys: Float[Tensor, "slots rows dim"] | None = None
        if self._indexer is not None:
            weight = self._indexer.wk.weight
            self._keys = weight.new_empty(context.max_sequence_length, context.max_batch_size, self._indexer.dim)

    def select_rows(self, rows: Int[Tensor, " selected"]) -> None:
        """Select sequences by row index."""
        if self._keys is not None:
            self._keys = self._keys.index_select(1, rows)

    def choose(
        self, inputs: Float[Tensor, "queries rows hidden"], latent: Float[Tensor, "queries rows latent"]
    ) -> Bool[Tensor, "rows 1 queries keys"] | None:
        """Cache the keys of the next tokens, and return True for the cached keys that they see. None: all keys.

        Args:
            latent: The normalised latent of the attention's queries.
        """
        context = self._context
        if self._indexer is None or self._keys is None:
            return context.choice
        first = context.sequence_len_offset
        last = first + len(inputs)
        rotation = context.rotation
        cosines, sines = (angles[first:last, :, 0, 0] for angles in (rotation.cosines, rotation.sines))
        query, key, weights = self._indexer(inputs, latent, cosines, sines)
        self._keys[first:last] = key
        context.choice = None
        if last <= self._topk and self._attention.seen is None:
            return None
        # Padding before a prompt is visible to padding only.
        added = context.added_mask(len(inputs), inputs.dtype)
        visible = causal_mask(len(inputs), last, inputs.device)[None] if added is None else added[:, 0] == 0
        blocks = choices_of_blocks(
            query, weights, self._keys[:last], lambda block, keys: visible[:, block, :keys], self._topk
        )
        choice = torch.cat([F.pad(block, (0, last - block.shape[-1])) for block in blocks], 1)
        self._keep(choice)
        if last > self._topk:
            context.choice = choice.unsqueeze(1)
        return context.choice

    def _keep(self, choice: Bool[Tensor, "rows queries keys"]) -> None:
        """Keep the positions of a choice, counted from the first token after padding, if choices are kept."""
        if self._attention.seen is None:
            return
        positions, pads = positions_of(choice, self._topk), self._context.num_pads
        if pads is not None:
            positions = torch.where(positions < 0, positions, positions - pads[:, None, None].int())
        positions = positions.transpose(0, 1)
        self._attention.keep(positions, positions)
