# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A model chunk's forward pass for generation: the weights of its modules, and none of what training needs besides.

With one token of each sequence at a time, what Megatron-Core's modules do around their products takes as long as they.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from nemo_rl_moe.models.megatron import cpu_backend  # noqa: F401  (before megatron.core)
from nemo_rl_moe.models.megatron.cpu_layers.cached_attention import (
    PaddedInferenceContext,
    cached_attention,
    new_layer_cache,
)
from nemo_rl_moe.models.megatron.cpu_layers.dispatcher import LocalMoELayer, gather_sum
from nemo_rl_moe.models.megatron.cpu_layers.eligibility import eligible
from nemo_rl_moe.models.megatron.cpu_layers.experts import ExpertProducts, GroupedExperts
from nemo_rl_moe.models.megatron.cpu_layers.linear import PlainColumnLinear, PlainRowLinear
from nemo_rl_moe.models.megatron.cpu_layers.norm import RMSNorm, rms_normalize
from nemo_rl_moe.models.megatron.cpu_layers.self_attention import FastSelfAttention

Apply = Callable[[Tensor], Tensor]


def has_cached_forward(chunk: Any) -> bool:
    """Whether a GPTModel chunk consists of what `CachedForward` knows."""
    return (
        eligible("cached_forward", chunk.config)
        and chunk.position_embedding_type == "rope"
        and chunk.rotary_percent == 1.0
        and all(map(_is_known, chunk.decoder.layers))
        and isinstance(chunk.decoder.final_layernorm, RMSNorm) == chunk.post_process
    )


def _is_known(layer: Any) -> bool:
    attention = layer.self_attention
    return (
        isinstance(attention, FastSelfAttention)
        and attention.has_own_norms
        and isinstance(layer.input_layernorm, RMSNorm)
        and isinstance(layer.pre_mlp_layernorm, RMSNorm)
    )


class CachedForward:
    """The forward pass of one batch through one chunk. Computes what the modules compute; keeps no trace in them.

    Args:
        chunk: A GPTModel chunk with `has_cached_forward`.
        context: The batch's key-value cache, still empty.
        angles: Rotary angles of all slots.
    """

    def __init__(self, chunk: Any, context: PaddedInferenceContext, angles: Float[Tensor, "slots 1 1 dim"]):
        self._embedding = _embedding(chunk.embedding) if chunk.pre_process else None
        self._layers = [_CachedLayer(layer, context, angles) for layer in chunk.decoder.layers]
        self._final_norm = None
        if chunk.post_process:
            self._final_norm = _norm(chunk.decoder.final_layernorm)
            self._layers[-1].last_column_only = True

    def __call__(
        self, token_ids: Int[Tensor, "rows columns"], received: Float[Tensor, "columns rows hidden"] | None
    ) -> Float[Tensor, "columns rows hidden"]:
        """Runs the next tokens, and keeps their keys and values.

        Args:
            token_ids: For the first pipeline stage.
            received: What the stage before returned, for all others.

        Returns:
            Hidden states; of the last column alone where they go into the output layer.
        """
        hidden_states = received if self._embedding is None else self._embedding(token_ids)
        assert hidden_states is not None
        for layer in self._layers:
            hidden_states = layer(hidden_states)
        return hidden_states if self._final_norm is None else self._final_norm(hidden_states)


class _CachedLayer:
    """One transformer layer of `CachedForward`.

    Attributes:
        last_column_only: Nothing but the last column matters after this layer.
    """

    last_column_only = False

    def __init__(self, layer: Any, context: PaddedInferenceContext, angles: Float[Tensor, "slots 1 1 dim"]):
        attention = layer.self_attention
        layout = attention.head_layout
        norms = attention.q_layernorm, attention.k_layernorm
        cache = new_layer_cache(context, angles, norms[0].weight, norms[1].weight, layout)
        context.key_value_memory_dict[layer.layer_number] = cache
        self._attention_norm = _norm(layer.input_layernorm)
        self._mixed = _linear(attention.linear_qkv)
        self._attend = partial(
            cached_attention,
            cache=cache,
            context=context,
            layout=layout,
            eps=norms[0].eps,
            scale=attention.softmax_scale,
        )
        self._project = _linear(attention.linear_proj)
        self._mlp_norm = _norm(layer.pre_mlp_layernorm)
        self._add_mlp = _mlp(layer.mlp)

    def __call__(self, hidden_states: Tensor) -> Tensor:
        context = self._attend(self._mixed(self._attention_norm(hidden_states)))
        if self.last_column_only:
            context, hidden_states = context[-1:], hidden_states[-1:]
        attended = self._project(context)
        attended += hidden_states
        return self._add_mlp(attended, self._mlp_norm(attended))


def _norm(norm: RMSNorm) -> Apply:
    weight, eps = norm.weight, norm.eps
    # The formula of training; torch's own function takes twice as long for a few rows.
    return lambda inputs: rms_normalize(inputs, eps).mul_(weight)


def _embedding(embedding: Any) -> Apply:
    if eligible("linear", embedding.config):
        weight = embedding.word_embeddings.weight
        return lambda token_ids: F.embedding(token_ids.t(), weight)
    return lambda token_ids: embedding(token_ids, None)


def _linear(linear: Any) -> Apply:
    if isinstance(linear, PlainColumnLinear | PlainRowLinear):
        return partial(F.linear, weight=linear.weight)
    return lambda inputs: linear(inputs)[0]


def _mlp(mlp: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """Adds an MLP's output for the second tensor to the first."""
    if isinstance(mlp, LocalMoELayer) and isinstance(mlp.experts, GroupedExperts):
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
    """Adds to a tensor what dispatcher, `GroupedExperts` and combination make of routed tokens.

    Args:
        residual: Is added to.
        tokens: The layer's input.
        probs: Of the chosen experts.
        experts: The chosen experts.
        weights_1: Of all experts, gate rows before up rows.
        weights_2: Of the second product.
    """
    numbers = torch.arange(weights_1.shape[0], device=tokens.device)
    # Stable, so that an expert sees its tokens in their order, as in training.
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
        # Elsewhere that adds in another order each time.
        residual += gather_sum(made, order.argsort().view_as(experts))
