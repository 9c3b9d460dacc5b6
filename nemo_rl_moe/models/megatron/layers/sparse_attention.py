# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Latent attention to the tokens that an indexer chooses (DeepSeek-V3.2, GLM-5), for sequences above `index_topk`.

A layer without an indexer uses the choice of the layer before it. The choice passes from layer to layer as the block's
`context`, which is otherwise unused. Activation checkpointing treats `context` as an input, so a recomputed layer gets
the choice of its own microbatch.
"""

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from nemo_rl_moe.models.megatron.cpu.attention import SDPAttention, causal_attention, masked_attention, packed_lengths
from nemo_rl_moe.models.megatron.layers.indexer import Indexed, Indexer
from nemo_rl_moe.models.megatron.layers.key_choice import chosen_in_sequences, first_positions, mask_of
from nemo_rl_moe.models.megatron.layers.latent_attention import LATENT_NORM_EPS, LatentSelfAttention
from nemo_rl_moe.routing.indexer_replay import ChosenKeys, replayed_keys

Chosen = Int[Tensor, "tokens rows topk"]
"""Positions that tokens see, counted from the start of their sequence. All tensor-parallel ranks have all tokens."""


class ChosenAttention(SDPAttention):
    """Core attention to chosen keys.

    Attributes:
        chosen: Positions of the keys of the next call. None: all keys up to the query.
    """

    chosen: Chosen | None = None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        if self.chosen is None:
            return super().forward(query, key, value, attention_mask, attn_mask_type, attention_bias, packed_seq_params)
        if packed_seq_params is None:
            return self._attend_to(query, key, value, self.chosen)
        lengths = packed_lengths(packed_seq_params, query.shape[0])
        tensors = (query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1), self.chosen)
        sequences = zip(*(tensor.split(lengths) for tensor in tensors), strict=True)
        return torch.cat([self._attend_to(*sequence) for sequence in sequences]).squeeze(1)

    def _attend_to(self, query: Tensor, key: Tensor, value: Tensor, chosen: Chosen) -> Tensor:
        keys = key.shape[0]
        if keys <= chosen.shape[-1]:
            return causal_attention(query, key, value, self.softmax_scale)
        mask = mask_of(chosen.transpose(0, 1), keys).unsqueeze(1)
        return masked_attention(query, key, value, mask, self.softmax_scale).flatten(2)


class SparseSelfAttention(LatentSelfAttention):
    """`LatentSelfAttention` whose queries see the `topk` tokens that the indexer chooses.

    Attributes:
        indexer: The layer's indexer. None in a layer that uses the choice of the layer before it.
        topk: Number of tokens that a query sees.
        choice_before: Choice of the layer before, for a layer without an indexer.
        captured: Positions to see instead of the indexer's choice, `NO_POSITION` in rows that the indexer chooses.
        seen: Choices of the passes since it was set, of tokens in any sequence. None: choices are not kept.
    """

    indexer: Indexer | None
    topk: int
    choice_before: Chosen | None = None
    captured: Chosen | None = None
    seen: list[ChosenKeys] | None = None
    core_attention: ChosenAttention

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.indexer = None
        self._latent: Tensor | None = None
        self.linear_q_up_proj.register_forward_pre_hook(self._keep_latent)

    def get_query_key_value_tensors(
        self,
        hidden_states: Float[Tensor, "tokens rows hidden"],
        key_value_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        inference_context: Any = None,
        **others: Any,
    ) -> Any:
        """Return queries, keys and values, and give the choice of keys to the core attention."""
        found = super().get_query_key_value_tensors(
            hidden_states, key_value_states, position_ids, packed_seq_params, inference_context, **others
        )
        latent, self._latent = self._latent, None
        assert latent is not None
        with torch.no_grad():
            if packed_seq_params is not None:
                latent = latent.unsqueeze(1)
            if inference_context is None:
                chosen = self._choice(hidden_states, latent, packed_seq_params)
            else:
                chosen = self._cached_choice(hidden_states, latent, inference_context)
        self.core_attention.chosen = chosen
        return found

    def _choice(self, hidden_states: Tensor, latent: Tensor, packed: PackedSeqParams | None) -> Chosen | None:
        """Return the choice of all tokens of a microbatch, or None if no sequence is longer than `topk`."""
        parts = self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1
        own = len(hidden_states)
        lengths = [own * parts] if packed is None else packed_lengths(packed, own * parts)
        if max(lengths) <= self.topk:
            return None
        if self.indexer is None:
            return self._of_layer_before()
        positions = torch.cat([torch.arange(length, device=latent.device) for length in lengths])
        first = own * parallel_state.get_tensor_model_parallel_rank() if parts > 1 else 0
        query, key, weights = self._indexed(hidden_states, latent, positions[first : first + own], max(lengths))
        if parts > 1:
            key = gather_from_sequence_parallel_region(key)
        live = chosen_in_sequences(query, weights, key, lengths, first, self.topk)
        if parts > 1:
            live = gather_from_sequence_parallel_region(live)
        chosen = live if self.captured is None else replayed_keys(live, self.captured)
        self.keep(live, chosen)
        return chosen

    def keep(self, live: Chosen, taken: Chosen) -> None:
        """Keep a choice in `seen` if choices are kept."""
        if self.seen is not None:
            self.seen.append(ChosenKeys(live.flatten(0, 1), taken.flatten(0, 1)))

    def _cached_choice(self, hidden_states: Tensor, latent: Tensor, cache: Any) -> Chosen | None:
        """Return the choice of the next tokens of sequences in Megatron-Core's key-value cache."""
        slots, first = cache.max_sequence_length, cache.sequence_len_offset
        last = first + len(hidden_states)
        if self.indexer is None:
            return self._of_layer_before() if last > self.topk else None
        if last <= self.topk and self.seen is not None:
            every = first_positions(torch.arange(first, last, device=latent.device), self.topk)
            every = every[:, None].expand(-1, hidden_states.shape[1], -1)
            self.keep(every, every)
        if slots <= self.topk:
            return None
        positions = torch.arange(first, last, device=latent.device)
        query, key, weights = self._indexed(hidden_states, latent, positions, slots)
        # A tuple of tensors with the rows second, as Megatron-Core's keys and values.
        memory, name = cache.key_value_memory_dict, f"indexer.{self.layer_number}"
        if first == 0:
            memory[name] = (key.new_empty(slots, *key.shape[1:]),)
        (keys,) = memory[name]
        keys[first:last] = key
        if last <= self.topk:
            return None
        chosen = chosen_in_sequences(query, weights, keys[:last], [last], first, self.topk)
        self.keep(chosen, chosen)
        return chosen

    def _of_layer_before(self) -> Chosen:
        assert self.choice_before is not None, f"layer {self.layer_number} has no indexer, and no layer before it has"
        return self.choice_before

    def _indexed(
        self, hidden_states: Tensor, latent: Tensor, positions: Int[Tensor, " tokens"], longest: int
    ) -> Indexed:
        assert self.indexer is not None
        angles = self.rotary_pos_emb(longest, packed_seq=False)
        angles, factor = angles if isinstance(angles, tuple) else (angles, 1.0)  # YaRN also returns a factor
        angles = angles[:, :, 0].index_select(0, positions)
        return self.indexer(hidden_states, latent, angles.cos() * factor, angles.sin() * factor)

    def _keep_latent(self, linear: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Keep the normalised latent of the queries. Transformer Engine's layer has the norm inside."""
        latent = inputs[0].detach()
        weight = getattr(linear, "layer_norm_weight", None)
        if weight is not None:
            latent = F.rms_norm(latent, weight.shape, weight.detach(), LATENT_NORM_EPS)
        self._latent = latent


class SparseLayer(TransformerLayer):
    """A decoder layer that passes the choice of its attention on if the next layer has no indexer."""

    passes_choice = False

    def forward(
        self, *args: Any, context: Chosen | None = None, **kwargs: Any
    ) -> tuple[Float[Tensor, "tokens rows hidden"], Chosen | None]:
        attention: Any = self.self_attention
        attention.choice_before = context
        try:
            hidden_states, _ = super().forward(*args, **kwargs)
            return hidden_states, attention.core_attention.chosen if self.passes_choice else None
        finally:
            attention.choice_before = attention.core_attention.chosen = None


def use_sparse_attention(block: TransformerBlockSubmodules) -> TransformerBlockSubmodules:
    """Return a copy of layer specs with latent attention, in which an indexer chooses the tokens of attention."""
    return dataclasses.replace(block, layer_specs=[_with_choice(layer) for layer in block.layer_specs])


def _with_choice(layer_spec: ModuleSpec) -> ModuleSpec:
    layer = layer_spec.submodules
    assert layer_spec.module is TransformerLayer
    submodules = dataclasses.replace(layer.self_attention.submodules, core_attention=ChosenAttention)
    attention = dataclasses.replace(layer.self_attention, module=SparseSelfAttention, submodules=submodules)
    changed = dataclasses.replace(layer, self_attention=attention)
    return dataclasses.replace(layer_spec, module=SparseLayer, submodules=changed)


def set_choices(chunk: GPTModel, topk: int) -> None:
    """Set the number of chosen tokens of a chunk's layers, and which layers pass their choice on."""
    layers = list(chunk.decoder.layers)
    for layer, following in zip(layers, [*layers[1:], None], strict=True):
        layer.self_attention.topk = topk
        layer.passes_choice = following is not None and following.self_attention.indexer is None
