# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Forward pass of a model chunk with key-value caches in evaluation."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from megatron.core.transformer.identity_op import IdentityOp
from torch import Tensor

from nemo_rl_moe.models.megatron.cpu.cached_attention import (
    HeadNorm,
    PaddedInferenceContext,
    Rotation,
    SelfAttentionCache,
)
from nemo_rl_moe.models.megatron.cpu.cached_latent_attention import LatentAttentionCache, has_cached_latents
from nemo_rl_moe.models.megatron.cpu.functions import PlainColumnLinear, PlainRowLinear, RMSNorm, rms_normalize
from nemo_rl_moe.models.megatron.cpu.fused_attention import FastSelfAttention, gated
from nemo_rl_moe.models.megatron.cpu.moe import ExpertProducts, GroupedExperts, LocalMoELayer, gather_sum
from nemo_rl_moe.models.megatron.cpu.spec import FastGPTModel, eligible
from nemo_rl_moe.models.megatron.layers.latent_attention import LatentSelfAttention
from nemo_rl_moe.models.megatron.layers.recurrent_mixer import RecurrentMixer, RecurrentState

Apply = Callable[[Tensor], Tensor]


def has_cached_forward(chunk: Any) -> bool:
    """Return whether `CachedForward` supports the modules of a chunk."""
    return (
        isinstance(chunk, FastGPTModel)
        and eligible("cached_forward", chunk.config)
        and chunk.position_embedding_type in ("rope", "mrope")
        and all(map(_is_known, chunk.decoder.layers))
        and isinstance(chunk.decoder.final_layernorm, RMSNorm) == chunk.post_process
    )


def _is_known(layer: Any) -> bool:
    attention = layer.self_attention
    if isinstance(attention, LatentSelfAttention):
        is_known = has_cached_latents(attention)
    else:
        is_known = isinstance(attention, FastSelfAttention | RecurrentMixer | IdentityOp)
    norms = [(layer.input_layernorm, attention), (layer.pre_mlp_layernorm, layer.mlp)]
    return is_known and all(isinstance(norm, RMSNorm) for norm, part in norms if not isinstance(part, IdentityOp))


def rotation_of(chunk: Any, num_slots: int, positions: Tensor | None = None) -> Rotation:
    """Return the rotation of a batch's slots.

    Args:
        positions: `[3, rows, slots]`, if the model's positions have three coordinates.
    """
    config = chunk.config
    # Megatron caches the angles of each length. Training could not use tensors from inference mode.
    with torch.inference_mode(False), torch.no_grad():
        if config.multi_latent_attention:
            angles = chunk.decoder.layers[0].self_attention.rotary_pos_emb(num_slots, packed_seq=False)
            # YaRN also returns a factor.
            angles, factor = angles if isinstance(angles, tuple) else (angles, 1.0)
            return Rotation(angles, config.qk_pos_emb_head_dim, factor)
        if positions is not None:
            return Rotation(chunk.rotary_pos_emb(positions), config.kv_channels)
        return Rotation(chunk.rotary_pos_emb(num_slots, packed_seq=False, cp_group=None), config.kv_channels)


PlaceImages = Callable[[Tensor, int], tuple[Tensor, Sequence[Tensor]]]
"""Function of word embeddings `[columns, rows, hidden]` and the index of their first slot. It puts image features among
the embeddings. It returns the decoder's input, and the features to add to the hidden states after each of the first
layers."""


class CachedForward:
    """Forward pass of one batch through one chunk, without state in the chunk's modules."""

    def __init__(self, chunk: Any, context: PaddedInferenceContext, place_images: PlaceImages | None = None):
        self._context, self._place_images = context, place_images
        self._embedding = _embedding(chunk.embedding) if chunk.pre_process else None
        self._layers = [_CachedLayer(layer, context) for layer in chunk.decoder.layers]
        self._final_norm = None
        if chunk.post_process:
            self._final_norm = _norm(chunk.decoder.final_layernorm)
            self._layers[-1].last_column_only = True

    def __call__(
        self, token_ids: Int[Tensor, "rows columns"], received: Float[Tensor, "columns rows hidden"] | None
    ) -> Float[Tensor, "columns rows hidden"]:
        """Cache the keys and values of the next tokens, and return their hidden states.

        The last stage returns only the last column.
        """
        deep: Sequence[Tensor] = ()
        if self._embedding is None:
            assert received is not None
            hidden_states = received
        else:
            hidden_states = self._embedding(token_ids)
            if self._place_images is not None:
                hidden_states, deep = self._place_images(hidden_states, self._context.sequence_len_offset)
        for layer, added in zip_longest(self._layers, deep):
            hidden_states = layer(hidden_states)
            if added is not None:
                # The model's last layer computes only the last column.
                hidden_states += added[-len(hidden_states) :]
        return hidden_states if self._final_norm is None else self._final_norm(hidden_states)


class _CachedLayer:
    last_column_only = False

    def __init__(self, layer: Any, context: PaddedInferenceContext):
        attention, mlp = layer.self_attention, layer.mlp
        self._attend = self._add_mlp = None
        if not isinstance(attention, IdentityOp):
            self._attention_norm = _norm(layer.input_layernorm)
            self._attend = _attention(attention, layer.layer_number, context)
            is_recurrent = isinstance(attention, RecurrentMixer)
            self._project = _linear(attention.out_proj if is_recurrent else attention.linear_proj)
        if not isinstance(mlp, IdentityOp):
            self._mlp_norm = _norm(layer.pre_mlp_layernorm)
            self._add_mlp = _mlp(mlp)
        self._router = getattr(mlp, "router", None)

    def __call__(self, hidden_states: Tensor) -> Tensor:
        context = None if self._attend is None else self._attend(self._attention_norm(hidden_states))
        if self.last_column_only:
            if self._shows_routes() and len(hidden_states) > 1:
                # This pass only records routes. The last column is computed below, as without a record.
                self._route(self._mlp_norm(self._add_attended(hidden_states, context)))
            context, hidden_states = None if context is None else context[-1:], hidden_states[-1:]
        attended = self._add_attended(hidden_states, context)
        return attended if self._add_mlp is None else self._add_mlp(attended, self._mlp_norm(attended))

    def _add_attended(self, hidden_states: Tensor, context: Tensor | None) -> Tensor:
        return hidden_states if context is None else self._project(context).add_(hidden_states)

    def _shows_routes(self) -> bool:
        return bool(getattr(getattr(self._router, "router_replay", None), "shows", False))

    def _route(self, inputs: Tensor) -> None:
        """Run the router for all columns of a layer that computes only the last, so that hooks record all of them."""
        router: Any = self._router
        if hasattr(router, "evaluate"):
            router.evaluate(inputs.view(-1, inputs.shape[-1]))
        else:
            router(inputs)


def _attention(attention: Any, layer_number: int, context: PaddedInferenceContext) -> Apply:
    """Return a function for attention up to its output projection, and add the layer's cache to the context."""
    caches = context.key_value_memory_dict
    if isinstance(attention, LatentSelfAttention):
        latents = caches[layer_number] = LatentAttentionCache(attention, context, _linear)
        return latents.attend
    if isinstance(attention, RecurrentMixer):
        state = caches[layer_number] = RecurrentState()
        return partial(_pass_state, attention, _linear(attention.in_proj), state, context)
    norm = HeadNorm.of_attention(attention)
    cache = caches[layer_number] = SelfAttentionCache(context, attention.head_layout, norm, attention.softmax_scale)
    mixed = _linear(attention.linear_qkv)

    def attend(inputs: Tensor) -> Tensor:
        heads, gates = attention.split_gates(mixed(inputs))
        return gated(cache.attend(heads), gates)

    return attend


def _pass_state(
    mixer: RecurrentMixer, project: Apply, state: RecurrentState, context: PaddedInferenceContext, inputs: Tensor
) -> Tensor:
    """Mix the next tokens with the state of earlier tokens. Padding before a prompt leaves the state empty."""
    return mixer.mix(project(inputs), state=state, padding=context.padding(len(inputs)))


def _norm(norm: RMSNorm) -> Apply:
    weight, eps = norm.factors, norm.eps
    # Same formula as in training. torch's function takes twice as long for a few rows.
    return lambda inputs: rms_normalize(inputs, eps).mul_(weight)


def _embedding(embedding: Any) -> Apply:
    if eligible("linear", embedding.config):
        weight = embedding.word_embeddings.weight
        return lambda token_ids: F.embedding(token_ids.t(), weight)
    return lambda token_ids: embedding(token_ids, None)


def _linear(linear: Any) -> Apply:
    # A hook adds an adapter's term.
    if isinstance(linear, PlainColumnLinear | PlainRowLinear) and not linear._forward_hooks:
        return partial(F.linear, weight=linear.weight, bias=linear.bias)
    return lambda inputs: linear(inputs)[0]


def _mlp(mlp: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function of `(residual, inputs)` that adds the MLP's output for the inputs to the residual."""
    if isinstance(mlp, LocalMoELayer) and type(mlp.experts) is GroupedExperts:
        return partial(_add_experts, mlp)
    return lambda residual, inputs: residual.add_(mlp(inputs)[0])


def _add_experts(mlp: Any, residual: Tensor, inputs: Tensor) -> Tensor:
    tokens = inputs.view(-1, inputs.shape[-1])
    probs, experts = mlp.router.evaluate(tokens)
    weights_1, weights_2 = mlp.experts.linear_fc1_weights, mlp.experts.linear_fc2_weights
    add_experts(residual.view_as(tokens), tokens, probs, experts, weights_1, weights_2)
    return residual.add_(mlp.shared_experts(inputs)) if mlp.use_shared_expert else residual


def add_experts(
    residual: Float[Tensor, "tokens hidden"],
    tokens: Float[Tensor, "tokens hidden"],
    probs: Float[Tensor, "tokens k"],
    experts: Int[Tensor, "tokens k"],
    weights_1: Float[Tensor, "experts two_ffn hidden"],
    weights_2: Float[Tensor, "experts hidden ffn"],
) -> None:
    """Add the routed experts' output to `residual` in place: dispatch, `GroupedExperts` and combination in one."""
    numbers = torch.arange(weights_1.shape[0], device=tokens.device)
    # Stable, so that each expert sees its tokens in order, as in training.
    expert_of_row, order = experts.view(-1).sort(stable=True)
    source = order // experts.shape[1]
    ends = torch.searchsorted(expert_of_row, numbers, right=True, out_int32=True)
    products = ExpertProducts(ends, tokens, (tokens.shape[1], weights_1.shape[1], weights_2.shape[2]))
    gate, up = products.with_weights(tokens.index_select(0, source), weights_1.transpose(1, 2)).chunk(2, -1)
    scaled = F.silu(gate).mul_(up).mul_(probs.reshape(-1, 1).index_select(0, order))
    made = products.with_weights(scaled, weights_2.transpose(1, 2))
    if made.device.type == "cpu":
        residual.index_add_(0, source, made)
    else:
        # On GPUs, index_add_ is not deterministic.
        residual += gather_sum(made, order.argsort().view_as(experts))
