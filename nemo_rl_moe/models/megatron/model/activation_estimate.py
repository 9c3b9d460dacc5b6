# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What a forward pass keeps for the backward pass with Transformer Engine's modules, term by term.

Each term stands for a line of code that allocates it, as torch's allocator has recorded them on a step of Qwen3-30B-A3B
(tests/unit/models/megatron/test_activation_estimate.py). No number is fitted.
"""

from dataclasses import astuple, dataclass

from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_rl_moe.models.megatron.layers.gated_delta_net import DeltaNetSizes
from nemo_rl_moe.models.megatron.model.transformer_config import linear_layer_indices, moe_layer_indices

_FLOAT32, _INT32, _INT64, _BOOL = 4, 4, 8, 1


@dataclass(frozen=True)
class LayerActivations:
    """Bytes that a layer keeps of a token, summed over tensor-parallel ranks.

    Attributes:
        input: The residual that the layer gets.
        attention: Queries, keys and values as attention takes them, and its output.
        query_key_norms: Inputs of the norms of queries and keys, which are copies out of the joint projection.
        norms: Outputs of the two norms of hidden states.
        residual: The sum behind attention.
        statistics: Float32 numbers of norms and softmax.
        routing: Probabilities, map and choice of experts, and the order of the permuted rows.
        matrices: Inputs of the matrices of the MLP half, and of its activation function.
    """

    input: int
    attention: int = 0
    query_key_norms: int = 0
    norms: int = 0
    residual: int = 0
    statistics: int = 0
    routing: int = 0
    matrices: int = 0

    @property
    def total(self) -> int:
        return int(sum(astuple(self)))


def layer_activations(transformer: TransformerConfig, index: int, *, is_replayed: bool = False) -> LayerActivations:
    """Return what a layer keeps. With full recomputation it is the input alone.

    Args:
        is_replayed: Whether routers replay captured experts. The chosen experts are then kept, too.
    """
    each = transformer.params_dtype.itemsize
    hidden = transformer.hidden_size * each
    if transformer.recompute_granularity == "full":
        return LayerActivations(hidden)
    is_linear = index in linear_layer_indices(transformer)
    has_experts = index in moe_layer_indices(transformer)
    normed_heads = 0
    if transformer.qk_layernorm and not is_linear and not transformer.multi_latent_attention:
        normed_heads = transformer.num_attention_heads + transformer.num_query_groups
    heads = 0 if is_linear else transformer.num_attention_heads
    is_recomputed = has_experts and transformer.recompute_granularity == "selective"
    return LayerActivations(
        input=hidden,
        attention=_attention(transformer, is_linear) * each,
        query_key_norms=normed_heads * transformer.kv_channels * each,
        norms=2 * hidden,
        residual=hidden,
        statistics=(2 + normed_heads + heads) * _FLOAT32,
        routing=_routing(transformer, is_replayed) if has_experts else 0,
        matrices=0 if is_recomputed else _matrices(transformer, has_experts) * each,
    )


def _attention(transformer: TransformerConfig, is_linear: bool) -> int:
    if is_linear:
        # Inputs of the convolution and of the rule, output gates, and the rule's output.
        sizes = DeltaNetSizes.of(transformer, tensor=1)
        return int(2 * sum(sizes.convolved) + 2 * sizes.values)
    value_dim = transformer.v_head_dim if transformer.multi_latent_attention else transformer.kv_channels
    heads = transformer.num_attention_heads + transformer.num_query_groups
    return int(heads * (transformer.kv_channels + value_dim))


def _routing(transformer: TransformerConfig, is_replayed: bool) -> int:
    """Return the bytes of the router's outputs, which Megatron-Core's dispatchers hold through recomputation too."""
    experts, chosen = transformer.num_moe_experts, transformer.moe_router_topk if is_replayed else 0
    return int(experts * (_FLOAT32 + _BOOL) + chosen * _INT64 + (2 * experts + 1) * _INT32)


def _matrices(transformer: TransformerConfig, has_experts: bool) -> int:
    if not has_experts:
        return int(3 * transformer.ffn_hidden_size)
    return int(transformer.moe_router_topk * (transformer.hidden_size + 3 * transformer.moe_ffn_hidden_size))


def head_activations(transformer: TransformerConfig, tokens: int, vocabulary: int, chunk: int | None) -> int:
    """Return the bytes of the last norm and of the output layer, of which a rank has a part of the vocabulary.

    Args:
        chunk: Tokens whose logits exist at a time; None for all.
    """
    each = transformer.params_dtype.itemsize
    # Input and output of the norm, and the gradient of the output.
    norm = 3 * tokens * transformer.hidden_size * each // transformer.tensor_model_parallel_size
    if chunk is None:
        return int(norm + tokens * vocabulary * _FLOAT32)
    # Logits and their gradient, float32 logits, and the sum of the weight's gradients.
    of_a_token = vocabulary * (2 * each + _FLOAT32)
    return int(norm + min(tokens, chunk) * of_a_token + transformer.hidden_size * vocabulary * _FLOAT32)
