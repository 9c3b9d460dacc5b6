# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What a forward pass keeps for the backward pass with Transformer Engine's modules, term by term.

Each term stands for a line of code that allocates it, as torch's allocator has recorded them on a step of Qwen3-30B-A3B
(tests/unit/models/megatron/test_activation_estimate.py). No number is fitted.
"""

from dataclasses import astuple, dataclass, replace

from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_rl_moe.models.layer_kinds import Mixer, layers_with_mlp, mixers_of
from nemo_rl_moe.models.megatron.layers.recurrent_sizes import recurrent_sizes
from nemo_rl_moe.routing.routers import moe_layer_indices

_FLOAT32, _INT32, _INT64, _BOOL = 4, 4, 8, 1


@dataclass(frozen=True)
class LayerActivations:
    """Bytes that a layer keeps of a token, summed over tensor-parallel ranks.

    Attributes:
        input: The residual that the layer gets.
        attention: Queries, keys and values as attention takes them, and its output.
        query_key_norms: Inputs of the norms of queries and keys, which are copies out of the joint projection.
        latents: Inputs and outputs of the norms of latent attention's latents.
        angles: Cosines and sines of the rotary angles of latent attention, which has no fused kernel for them.
        norms: Outputs of the two norms of hidden states.
        residual: The sum behind attention.
        statistics: Float32 numbers of norms and softmax.
        routing: Probabilities and map of experts, the order of the permuted rows, and replayed experts.
        matrices: Inputs of the matrices of the MLP half, and of its activation function.
    """

    input: int
    attention: int = 0
    query_key_norms: int = 0
    latents: int = 0
    angles: int = 0
    norms: int = 0
    residual: int = 0
    statistics: int = 0
    routing: int = 0
    matrices: int = 0

    @property
    def total(self) -> int:
        return int(sum(astuple(self)))


def layer_activations(
    transformer: TransformerConfig, index: int, *, is_replayed: bool = False, is_packed: bool = False
) -> LayerActivations:
    """Return what a layer keeps. With full recomputation it is the input.

    Args:
        is_replayed: Whether routers replay captured experts, which the layer then keeps, also with recomputation.
        is_packed: Whether sequences are packed, which widens the values of latent attention.
    """
    kept = _kept_without_recomputation(transformer, index, is_packed)
    has_experts = index in moe_layer_indices(transformer)
    chosen = transformer.moe_router_topk * _INT64 if is_replayed and has_experts else 0
    if transformer.recompute_granularity == "full":
        return LayerActivations(kept.input, routing=chosen)
    if not has_experts:
        return kept
    if transformer.recompute_granularity == "selective":
        return replace(kept, routing=chosen, matrices=0)
    return replace(kept, routing=kept.routing + chosen)


def recomputed_activations(
    transformer: TransformerConfig, index: int, *, is_packed: bool = False, are_experts_adapted: bool = False
) -> int:
    """Return the bytes of a token at the fullest moment of the layer's recomputation, beyond `layer_activations`.

    The moment is the end of the experts' last product. Experts are balanced.

    Args:
        is_packed: As in `layer_activations`.
        are_experts_adapted: Whether routed experts have adapters.
    """
    has_experts = index in moe_layer_indices(transformer)
    if transformer.recompute_granularity is None:
        return 0
    kept = _kept_without_recomputation(transformer, index, is_packed)
    before_experts = kept.total - kept.input - kept.matrices
    if not has_experts:
        return before_experts + kept.matrices if transformer.recompute_granularity == "full" else 0
    # Rows of the rank's tokens, rows from all ranks, the same by expert, and the output of the last product.
    copies = 4 if transformer.expert_model_parallel_size > 1 else 3
    copies += 2 if are_experts_adapted else 0  # the adapter's term, before and after its scale
    size = transformer.moe_latent_size or transformer.hidden_size
    of_experts = transformer.moe_router_topk * (copies * size + _widths(transformer) * transformer.moe_ffn_hidden_size)
    if transformer.moe_shared_expert_intermediate_size is not None:
        of_experts += _shared_experts(transformer) + transformer.hidden_size
    is_whole = transformer.recompute_granularity == "full"
    return int((before_experts if is_whole else kept.routing) + of_experts * transformer.params_dtype.itemsize)


def _kept_without_recomputation(transformer: TransformerConfig, index: int, is_packed: bool) -> LayerActivations:
    each = transformer.params_dtype.itemsize
    hidden = transformer.hidden_size * each
    mixer, has_mlp = mixers_of(transformer)[index], index in layers_with_mlp(transformer)
    has_attention = mixer is Mixer.ATTENTION
    halves = has_mlp + (mixer is not None)
    has_experts = index in moe_layer_indices(transformer)
    normed_heads = 0
    if transformer.qk_layernorm and has_attention and not transformer.multi_latent_attention:
        normed_heads = transformer.num_attention_heads + transformer.num_query_groups
    heads = transformer.num_attention_heads if has_attention else 0
    latents = _latents(transformer) if has_attention else []
    return LayerActivations(
        input=hidden,
        attention=_attention(transformer, mixer, is_packed) * each,
        query_key_norms=normed_heads * transformer.kv_channels * each,
        latents=2 * sum(latents) * each,
        # Queries and keys each have their own.
        angles=4 * transformer.qk_pos_emb_head_dim * each if latents else 0,
        norms=halves * hidden,
        residual=hidden * (halves - 1),
        statistics=(halves + normed_heads + len(latents) + heads) * _FLOAT32,
        routing=_routing(transformer) if has_experts else 0,
        matrices=_matrices(transformer, has_experts) * each if has_mlp else 0,
    )


def _attention(transformer: TransformerConfig, mixer: Mixer | None, is_packed: bool) -> int:
    if mixer is None:
        return 0
    if mixer is not Mixer.ATTENTION:
        # Inputs of the convolution and of the recurrence, output gates, and the recurrence's output.
        sizes = recurrent_sizes(transformer, tensor=1)
        return int(2 * sum(sizes.convolved) + 2 * sizes.values)
    key_dim, heads = transformer.kv_channels, transformer.num_attention_heads
    value_dim = transformer.v_head_dim if transformer.multi_latent_attention else key_dim
    if is_packed and value_dim != key_dim:
        # Megatron-Core pads packed values to the width of keys. The output is kept padded, and again without padding.
        return int(heads * (4 * key_dim + value_dim))
    return int((heads + transformer.num_query_groups) * (key_dim + value_dim))


def _latents(transformer: TransformerConfig) -> list[int]:
    """Return the widths of the latents of queries and keys."""
    if not transformer.multi_latent_attention:
        return []
    return [rank for rank in (transformer.q_lora_rank, transformer.kv_lora_rank) if rank is not None]


def _routing(transformer: TransformerConfig) -> int:
    """Return the bytes of the router's outputs and of the order of rows."""
    experts = transformer.num_moe_experts
    return int(experts * (_FLOAT32 + _BOOL) + (2 * experts + 1) * _INT32)


def _widths(transformer: TransformerConfig) -> int:
    return 3 if transformer.gated_linear_unit else 2


def _shared_experts(transformer: TransformerConfig) -> int:
    return int(_widths(transformer) * (transformer.moe_shared_expert_intermediate_size or 0))


def _matrices(transformer: TransformerConfig, has_experts: bool) -> int:
    widths = _widths(transformer)
    if not has_experts:
        return int(widths * transformer.ffn_hidden_size)
    of_row = transformer.hidden_size + widths * transformer.moe_ffn_hidden_size
    return int(transformer.moe_router_topk * of_row) + _shared_experts(transformer)


def head_activations(
    transformer: TransformerConfig, tokens: int, vocabulary: int, chunk: int | None, *, is_frozen: bool = False
) -> int:
    """Return the bytes of the last norm and of the output layer, of which a rank has a part of the vocabulary.

    Args:
        chunk: Tokens whose logits exist at a time; None for all.
        is_frozen: Whether the output layer's weight gets no gradient.
    """
    each, hidden = transformer.params_dtype.itemsize, transformer.hidden_size
    # Input and output of the norm, and the gradient of the output.
    norm = 3 * tokens * hidden * each // transformer.tensor_model_parallel_size
    if chunk is None:
        return int(norm + tokens * vocabulary * _FLOAT32)
    # Float32 logits, and the logits before the conversion or their gradient.
    of_logits = min(tokens, chunk) * vocabulary
    logits = of_logits * (_FLOAT32 + (0 if each == _FLOAT32 else each))
    if is_frozen:
        return int(norm + logits)
    # The float32 sum of the weight's gradients. Those of a chunk come while the gradient of its logits exists.
    of_weight = hidden * vocabulary
    of_chunk = of_logits * _FLOAT32 if each == _FLOAT32 else (of_logits + of_weight) * each
    return int(norm + of_weight * _FLOAT32 + max(logits, of_chunk))
