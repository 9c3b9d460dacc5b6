# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Which configurations the fast modules were made for; everything else keeps Megatron-Core's own modules."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F

from nemo_rl_moe.models.megatron import cpu_backend  # noqa: F401  (before megatron.core)

# isort: split
from megatron.core.transformer.transformer_config import TransformerConfig

FastModule = Literal[
    "norm",
    "linear",
    "core_attention",
    "sink_attention",
    "self_attention",
    "experts",
    "local_routing",
    "cross_entropy",
    "cached_forward",
]

# Field to the one value that is supported. A field that a version of Megatron-Core lacks counts as having that value.
_EVERYWHERE: Mapping[str, Any] = {
    "fp8": None,
    "fp4": None,
    "cuda_graph_impl": "none",
    "cpu_offloading": False,
    "fine_grained_activation_offloading": False,
    "delay_wgrad_compute": False,
    "overlap_moe_expert_parallel_comm": False,
    "use_kitchen": False,
    "experimental_attention_variant": None,
}
_ANY_CORE_ATTENTION: Mapping[str, Any] = {
    "context_parallel_size": 1,
    "attention_dropout": 0.0,
    "apply_query_key_layer_scaling": False,
    "qk_clip": False,
}
_CORE_ATTENTION: Mapping[str, Any] = {**_ANY_CORE_ATTENTION, "softmax_type": "vanilla", "window_size": None}
_REQUIRED: Mapping[FastModule, Mapping[str, Any]] = {
    "norm": {
        "normalization": "RMSNorm",
        "layernorm_zero_centered_gamma": False,
        "memory_efficient_layer_norm": False,
    },
    "linear": {
        "tensor_model_parallel_size": 1,
        "gradient_accumulation_fusion": False,
        "defer_embedding_wgrad_compute": False,
    },
    "core_attention": _CORE_ATTENTION,
    "sink_attention": _ANY_CORE_ATTENTION,
    "self_attention": {
        **_CORE_ATTENTION,
        "attention_output_gate": False,
        "apply_rope_fusion": False,
        "fused_single_qkv_rope": False,
        "flash_decode": False,
        "mrope_section": None,
        "multi_latent_attention": False,
        "no_rope_freq": None,
        "qk_l2_norm": False,
        "rotary_interleaved": False,
        "test_mode": False,
        "yarn_rotary_scaling_factor": None,
    },
    "experts": {
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "activation_func_clamp_value": None,
        "activation_func_fp8_input_store": False,
        "add_bias_linear": False,
        "expert_tensor_parallel_size": 1,
        "glu_linear_offset": 0.0,
        "moe_apply_probs_on_input": False,
        "moe_latent_size": None,
        "moe_router_padding_for_quantization": False,
        "overlap_dispatch_backward_with_experts_wgrad": False,
        "use_te_activation_func": False,
    },
    "local_routing": {
        "tensor_model_parallel_size": 1,
        "context_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": 1,
        "add_bias_linear": False,
        "moe_enable_routing_replay": False,
        "moe_expert_capacity_factor": None,
        "moe_input_jitter_eps": None,
        "moe_latent_size": None,
        "moe_pad_expert_input_to_capacity": False,
        "moe_permute_fusion": False,
        "moe_router_enable_expert_bias": False,
        "moe_router_force_biased": None,
        "moe_router_force_hot_rank": None,
        "moe_router_force_load_balancing": False,
        "moe_router_fusion": False,
        "moe_router_group_topk": None,
        "moe_router_num_groups": None,
        "moe_router_padding_for_quantization": False,
        "moe_router_score_function": "softmax",
        "moe_shared_expert_overlap": False,
        "moe_token_dispatcher_type": "alltoall",
        "moe_z_loss_coeff": None,
    },
    "cross_entropy": {"tensor_model_parallel_size": 1, "cross_entropy_loss_fusion": False},
    "cached_forward": {
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "apply_residual_connection_post_layernorm": False,
        # Padding would take the places of real tokens at experts that take only so many.
        "moe_expert_capacity_factor": None,
        "fp32_residual_connection": False,
        "multi_latent_attention": False,
        # In other types every rounding would have to be that of training: a near tie in a router can flip.
        "params_dtype": torch.float32,
        "use_mup": False,
    },
}


def _divides_query_groups(config: TransformerConfig) -> bool:
    return config.num_query_groups % config.tensor_model_parallel_size == 0


def _plain_load_balancing(config: TransformerConfig) -> bool:
    # Not `in`: the field can be a list, of several losses.
    return config.moe_router_load_balancing_type == "aux_loss" or config.moe_router_load_balancing_type == "none"


def _looks_back_only(config: TransformerConfig) -> bool:
    window = config.window_size
    return config.softmax_type in ("vanilla", "learnable") and (window is None or (window[0] >= 0 and window[1] == 0))


_FURTHER: Mapping[FastModule, Callable[[TransformerConfig], bool]] = {
    "sink_attention": _looks_back_only,
    "self_attention": _divides_query_groups,
    "local_routing": _plain_load_balancing,
}


def eligible(module: FastModule, config: TransformerConfig) -> bool:
    """Whether a fast module computes what the stock one does under this configuration.

    Args:
        module: Which one. `local_routing` is the index router together with the local dispatcher.
        config: The model's configuration.
    """
    required = {**_EVERYWHERE, **_REQUIRED[module]}
    if any(getattr(config, field, value) != value for field, value in required.items()):
        return False
    return module not in _FURTHER or _FURTHER[module](config)
