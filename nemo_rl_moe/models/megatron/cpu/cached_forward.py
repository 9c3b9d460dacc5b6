# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention with a key-value cache in evaluation: keys are cached after rotation, and prompts may be left-padded.

Megatron-Core caches unrotated keys and rotates all of them at every token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from nemo_rl_moe.models.megatron.cpu import cpu_backend  # noqa: F401  (before megatron.core)
from nemo_rl_moe.models.megatron.cpu.attention import causal_mask
from nemo_rl_moe.models.megatron.cpu.functions import PlainColumnLinear, PlainRowLinear, RMSNorm, rms_normalize
from nemo_rl_moe.models.megatron.cpu.fused_attention import FastSelfAttention, HeadLayout
from nemo_rl_moe.models.megatron.cpu.moe import ExpertProducts, GroupedExperts, LocalMoELayer, gather_sum
from nemo_rl_moe.models.megatron.cpu.spec import eligible

# isort: split
from megatron.core.inference.contexts import StaticInferenceContext


class Rotation:
    """Cosines and sines of a batch's rotary angles, shared by all layers."""

    def __init__(self, angles: Float[Tensor, "slots rows_or_1 1 dim"]):
        angles = angles[:, :, :, None]
        self.cosines: Float[Tensor, "slots rows_or_1 1 1 dim"] = angles.cos()
        self.sines: Float[Tensor, "slots rows_or_1 1 1 dim"] = angles.sin()

    @property
    def of_rows(self) -> bool:
        """Return whether each row has its own angles."""
        return self.cosines.shape[1] > 1

    def keep_rows(self, rows: Int[Tensor, " kept"]) -> None:
        """Drop all other rows of the batch."""
        if self.of_rows:
            self.cosines, self.sines = self.cosines.index_select(1, rows), self.sines.index_select(1, rows)


@dataclass
class LayerCache:
    """Key-value cache of one attention layer.

    Attributes:
        keys_and_values: Keys normalised and rotated.
        swapped: The other half of each weight, the first half negative.
    """

    keys_and_values: Float[Tensor, "rows groups 2 slots dim"]
    rotation: Rotation
    weight: Float[Tensor, "heads dim"]
    swapped: Float[Tensor, "heads dim"]

    def __post_init__(self) -> None:
        # Where rows differ, the products of all slots would take more memory than the keys and values.
        self._products = None if self.rotation.of_rows else self._products_of(slice(None))

    def factors(self, slots: slice) -> tuple[Float[Tensor, "some rows_or_1 1 heads dim"], ...]:
        """Return cosines and sines times the norms' weights, for heads and for their swapped halves."""
        if self._products is None:
            return self._products_of(slots)
        return tuple(product[slots] for product in self._products)

    def _products_of(self, slots: slice) -> tuple[Tensor, ...]:
        return self.rotation.cosines[slots] * self.weight, self.rotation.sines[slots] * self.swapped

    def keep_rows(self, rows: Int[Tensor, " kept"]) -> None:
        """Keep some rows, except in the rotation, which layers share."""
        self.keys_and_values = self.keys_and_values.index_select(0, rows)


class PaddedInferenceContext(StaticInferenceContext):
    """A key-value cache for `CachedForward` with optional padding at the beginning of rows.

    As rotary embedding is relative, the padding shifts a row's positions and changes nothing else.

    Args:
        num_slots: Tokens of each row, padding included.
        num_pads: Padding before each row; None where there is none.
    """

    def __init__(self, num_rows: int, num_slots: int, rotation: Rotation, num_pads: Int[Tensor, " rows"] | None = None):
        super().__init__(num_rows, num_slots)
        self.rotation = rotation
        self._hidden_slots = None
        if num_pads is not None:
            self._hidden_slots = torch.arange(num_slots, device=num_pads.device) < num_pads[:, None, None, None]
        self._mask: tuple[tuple[int, int], Tensor] | None = None

    def keep_rows(self, rows: Int[Tensor, " kept"]) -> None:
        self.rotation.keep_rows(rows)
        for cache in self.key_value_memory_dict.values():
            cache.keep_rows(rows)
        if self._hidden_slots is not None:
            self._hidden_slots = self._hidden_slots.index_select(0, rows)
        self._mask = None

    def added_mask(self, queries: int, dtype: torch.dtype) -> Float[Tensor, "rows 1 queries keys"] | None:
        """Return an additive mask of the next slots: minus infinity for padding and later slots; None: no padding."""
        if self._hidden_slots is None:
            return None
        first = self.sequence_len_offset
        if self._mask is None or self._mask[0] != (first, queries):
            keys = first + queries
            hidden = self._hidden_slots[..., :keys]
            if queries > 1:
                # Padding itself must look at something: of no keys at all the softmax is not a number.
                hidden = hidden & ~self._hidden_slots[..., first:keys].transpose(2, 3)
                hidden = hidden | ~causal_mask(queries, keys, hidden.device)
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
            # The same for all layers.
            self._mask = ((first, queries), mask)
        return self._mask[1]


def new_layer_cache(
    context: PaddedInferenceContext,
    query_weight: Float[Tensor, " dim"],
    key_weight: Float[Tensor, " dim"],
    layout: HeadLayout,
) -> LayerCache:
    half = layout.dim // 2
    shape = (context.max_batch_size, layout.groups, 2, context.max_sequence_length, layout.dim)
    weight = torch.cat([query_weight.expand(layout.heads_per_group, layout.dim), key_weight.view(1, layout.dim)])
    swapped = torch.cat([-weight[:, half:], weight[:, :half]], -1)
    return LayerCache(weight.new_empty(shape), context.rotation, weight, swapped)


def cached_attention(
    mixed: Float[Tensor, "queries rows mixed"],
    cache: LayerCache,
    context: PaddedInferenceContext,
    layout: HeadLayout,
    eps: float,
    scale: float,
) -> Float[Tensor, "queries rows heads_dim"]:
    """Normalise and rotate new queries and keys, cache keys and values, and attend to the whole cache.

    Args:
        mixed: Queries, keys and values in Megatron-Core's layout; overwritten. Several slots only into an empty cache.
    """
    queries, rows, _ = mixed.shape
    groups, heads, dim = layout.groups, layout.heads_per_group, layout.dim
    first = context.sequence_len_offset
    last = first + queries
    split = mixed.view(queries, rows, groups, heads + 2, dim)
    queries_and_keys = split[..., : heads + 1, :]
    normalized = rms_normalize(queries_and_keys, eps)
    cosines, sines = cache.factors(slice(first, last))
    torch.addcmul(normalized * cosines, normalized.roll(dim // 2, -1), sines, out=queries_and_keys)
    cache.keys_and_values[:, :, :, first:last] = split[..., heads:, :].permute(1, 2, 3, 0, 4)
    keys, values = cache.keys_and_values[:, :, :, :last].unbind(2)
    mask = context.added_mask(queries, mixed.dtype)
    if queries == 1:
        # The heads of a group share its keys: together they are a list of queries.
        query = split[0, :, :, :heads]
        attended = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)
        return attended.reshape(1, rows, groups * heads * dim)
    query = split[..., :heads, :].reshape(queries, rows, groups * heads, dim).permute(1, 2, 0, 3)
    attended = F.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=heads > 1
    )
    return attended.permute(2, 0, 1, 3).reshape(queries, rows, groups * heads * dim)


Apply = Callable[[Tensor], Tensor]


def has_cached_forward(chunk: Any) -> bool:
    """Return True for a GPTModel chunk whose modules `CachedForward` supports."""
    return (
        eligible("cached_forward", chunk.config)
        and chunk.position_embedding_type in ("rope", "mrope")
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


PlaceImages = Callable[[Tensor, int], tuple[Tensor, Sequence[Tensor]]]
"""Places image features among the word embeddings `[columns, rows, hidden]` of the slots from a first one on; returns
the decoder's input, and what is added to the hidden states after each of its first layers."""


class CachedForward:
    """Run one batch through one chunk as its modules would, without keeping state in them."""

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
        """Run the next tokens, and cache their keys and values.

        Returns:
            Hidden states; only of the last column where they go into the output layer.
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
                # The last layer of all computes the last column alone.
                hidden_states += added[-len(hidden_states) :]
        return hidden_states if self._final_norm is None else self._final_norm(hidden_states)


class _CachedLayer:
    last_column_only = False

    def __init__(self, layer: Any, context: PaddedInferenceContext):
        attention = layer.self_attention
        layout = attention.head_layout
        norms = attention.q_layernorm, attention.k_layernorm
        cache = new_layer_cache(context, norms[0].weight, norms[1].weight, layout)
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
        self._router = getattr(layer.mlp, "router", None)

    def __call__(self, hidden_states: Tensor) -> Tensor:
        context = self._attend(self._mixed(self._attention_norm(hidden_states)))
        if self.last_column_only:
            if self._shows_routes() and len(context) > 1:
                # For the eye alone: the numbers that follow stay those of a pass that nobody watches.
                self._route(self._mlp_norm(self._project(context).add_(hidden_states)))
            context, hidden_states = context[-1:], hidden_states[-1:]
        attended = self._project(context)
        attended += hidden_states
        return self._add_mlp(attended, self._mlp_norm(attended))

    def _shows_routes(self) -> bool:
        return bool(getattr(getattr(self._router, "router_replay", None), "shows", False))

    def _route(self, inputs: Tensor) -> None:
        """Route all columns of a layer of which only the last one is computed."""
        router: Any = self._router
        route = getattr(router, "evaluate", None)
        if route is None:
            router(inputs)
        else:
            route(inputs.view(-1, inputs.shape[-1]))


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
    # A hook adds an adapter's term.
    if isinstance(linear, PlainColumnLinear | PlainRowLinear) and not linear._forward_hooks:
        return partial(F.linear, weight=linear.weight)
    return lambda inputs: linear(inputs)[0]


def _mlp(mlp: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """Add an MLP's output for the second tensor to the first."""
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
    """Add the routed experts' output to a tensor: dispatch, `GroupedExperts` and combination in one.

    Args:
        residual: Overwritten with the sum.
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
