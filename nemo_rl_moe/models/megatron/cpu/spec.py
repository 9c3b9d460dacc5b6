# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Layer spec with the fast modules for CPUs that support the configuration, and Megatron-Core's modules otherwise."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_rl_moe.models.megatron.cpu.attention import SDPAttention
from nemo_rl_moe.models.megatron.cpu.functions import (
    PlainColumnLinear,
    PlainRowLinear,
    RMSNorm,
    ZeroCenteredRMSNorm,
    cross_entropy,
)
from nemo_rl_moe.models.megatron.cpu.fused_attention import FastSelfAttention
from nemo_rl_moe.models.megatron.cpu.moe import GroupedExperts, IndexTopKRouter, LocalMoELayer
from nemo_rl_moe.models.megatron.cpu.sink_attention import SinkAttention

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

# The supported value of each field. A field that a version of Megatron-Core lacks counts as supported.
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
    "norm": {"normalization": "RMSNorm", "memory_efficient_layer_norm": False},
    "linear": {
        "tensor_model_parallel_size": 1,
        "gradient_accumulation_fusion": False,
        "defer_embedding_wgrad_compute": False,
    },
    "core_attention": _CORE_ATTENTION,
    "sink_attention": _ANY_CORE_ATTENTION,
    "self_attention": {
        **_CORE_ATTENTION,
        "apply_rope_fusion": False,
        "fused_single_qkv_rope": False,
        "flash_decode": False,
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
    },
    "cross_entropy": {"tensor_model_parallel_size": 1, "cross_entropy_loss_fusion": False},
    "cached_forward": {
        "add_bias_linear": False,
        "apply_residual_connection_post_layernorm": False,
        # Padding would use up the capacity of experts.
        "moe_expert_capacity_factor": None,
        "cache_mla_latents": False,
        "fp32_residual_connection": False,
        "rotary_interleaved": False,
        # In other types, rounding differs from training, and can flip near ties in routers.
        "params_dtype": torch.float32,
        "use_mup": False,
    },
}


def _looks_back_only(config: TransformerConfig) -> bool:
    window = config.window_size
    return config.softmax_type in ("vanilla", "learnable") and (window is None or (window[0] >= 0 and window[1] == 0))


_FURTHER: Mapping[FastModule, Callable[[TransformerConfig], bool]] = {
    "sink_attention": _looks_back_only,
    "self_attention": lambda config: config.num_query_groups % config.tensor_model_parallel_size == 0,
    # A list of several losses is supported.
    "local_routing": lambda config: config.moe_router_load_balancing_type not in ("sinkhorn", "quantile_balancing"),
}


def eligible(module: FastModule, config: TransformerConfig) -> bool:
    """Return whether a fast module supports this configuration.

    The module `local_routing` is `IndexTopKRouter` with `LocalTokenDispatcher`.
    """
    required = {**_EVERYWHERE, **_REQUIRED[module]}
    if any(getattr(config, field, value) != value for field, value in required.items()):
        return False
    return module not in _FURTHER or _FURTHER[module](config)


@dataclasses.dataclass(frozen=True)
class BuildableSpec:
    """A `ModuleSpec` by another name: TransformerLayer of 0.16.1 warns if a `ModuleSpec` has an unknown class."""

    module: type
    submodules: Any
    params: dict[str, Any] = dataclasses.field(default_factory=dict)


def _norm(config: TransformerConfig) -> type[RMSNorm]:
    return ZeroCenteredRMSNorm if config.layernorm_zero_centered_gamma else RMSNorm


def replace_norms(config: TransformerConfig, layer_spec: ModuleSpec) -> ModuleSpec:
    """Return a copy of a layer spec with this project's norms instead of torch's."""
    if not eligible("norm", config):
        return layer_spec
    layer, replacements = layer_spec.submodules, {WrappedTorchNorm: _norm(config)}
    attention = layer.self_attention
    attention_submodules = _replaced(attention.submodules, replacements)
    self_attention = dataclasses.replace(attention, submodules=attention_submodules)
    layer = dataclasses.replace(_replaced(layer, replacements), self_attention=self_attention)
    return dataclasses.replace(layer_spec, submodules=layer)


def fast_layer_spec(config: TransformerConfig, layer_spec: ModuleSpec) -> ModuleSpec:
    """Return a copy of a layer spec with every fast module that the configuration allows."""
    layer_spec = replace_norms(config, layer_spec)
    layer = layer_spec.submodules
    linears = _fast_linears(config)
    attention = layer.self_attention
    replacements = dict(linears)
    if eligible("core_attention", config):
        replacements[DotProductAttention] = SDPAttention
    elif eligible("sink_attention", config):
        replacements[DotProductAttention] = SinkAttention
    stock = attention.module is SelfAttention and attention.submodules.core_attention is DotProductAttention
    attention = dataclasses.replace(
        attention,
        module=FastSelfAttention if stock and eligible("self_attention", config) else attention.module,
        submodules=_replaced(attention.submodules, replacements),
    )
    layer = dataclasses.replace(layer, self_attention=attention, mlp=_fast_mlp(config, layer.mlp, linears))
    return dataclasses.replace(layer_spec, submodules=layer)


def block_spec(
    config: TransformerConfig, block: TransformerBlockSubmodules, *, fast: bool
) -> TransformerBlockSubmodules:
    """Return a copy of a block's spec with replaced layers and final norm."""
    change = fast_layer_spec if fast else replace_norms
    layers = [change(config, layer_spec) for layer_spec in block.layer_specs]
    own_norm = block.layer_norm is WrappedTorchNorm and eligible("norm", config)
    return dataclasses.replace(block, layer_specs=layers, layer_norm=_norm(config) if own_norm else block.layer_norm)


class FastGPTModel(GPTModel):
    """`GPTModel` with a plain output layer and cross entropy if the configuration allows."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        output_layer = getattr(self, "output_layer", None)
        if type(output_layer) is ColumnParallelLinear and eligible("linear", config):
            # GPTModel takes no spec for its output layer. Parameters and attributes are the same.
            output_layer.__class__ = PlainColumnLinear

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Return the loss of each token, `[batch, sequence]`, from logits `[sequence, batch, vocabulary]`."""
        if eligible("cross_entropy", self.config):
            return cross_entropy(logits, labels)
        return super().compute_language_model_loss(labels, logits)


def _fast_linears(config: TransformerConfig) -> dict[type, type]:
    if not eligible("linear", config):
        return {}
    return {ColumnParallelLinear: PlainColumnLinear, RowParallelLinear: PlainRowLinear}


def _replaced(submodules: Any, replacements: dict[type, type]) -> Any:
    """Return a copy of a dataclass of submodules with some classes replaced."""
    values = {field.name: getattr(submodules, field.name) for field in dataclasses.fields(submodules)}
    classes = {name: value for name, value in values.items() if isinstance(value, type)}
    changes = {name: replacements[value] for name, value in classes.items() if value in replacements}
    return dataclasses.replace(submodules, **changes)


def _fast_mlp(config: TransformerConfig, mlp: Any, linears: dict[type, type]) -> Any:
    submodules = _submodules(mlp)
    if not isinstance(submodules, MoESubmodules):
        return mlp if submodules is None else _with_submodules(mlp, _replaced(submodules, linears))
    stock_experts = _module(submodules.experts) is SequentialMLP
    if stock_experts and eligible("experts", config):
        submodules = dataclasses.replace(submodules, experts=GroupedExperts)
    elif stock_experts and config.expert_tensor_parallel_size == 1:
        submodules = dataclasses.replace(submodules, experts=_with_linears(submodules.experts, linears))
    if submodules.shared_experts is not None:
        submodules = dataclasses.replace(submodules, shared_experts=_with_linears(submodules.shared_experts, linears))
    if _module(mlp) is not MoELayer or submodules.router is not TopKRouter or not eligible("local_routing", config):
        return _with_submodules(mlp, submodules)
    submodules = dataclasses.replace(submodules, router=IndexTopKRouter)
    if isinstance(mlp, functools.partial):
        return functools.partial(LocalMoELayer, *mlp.args, **{**mlp.keywords, "submodules": submodules})
    return BuildableSpec(LocalMoELayer, submodules, mlp.params)


# Megatron-Core 0.16 describes an MLP with a ModuleSpec, 0.19 with functools.partial. Both hold `submodules`.


def _submodules(spec: Any) -> Any:
    return spec.keywords.get("submodules") if isinstance(spec, functools.partial) else getattr(spec, "submodules", None)


def _module(spec: Any) -> Any:
    return spec.func if isinstance(spec, functools.partial) else getattr(spec, "module", spec)


def _with_submodules(spec: Any, submodules: Any) -> Any:
    if isinstance(spec, functools.partial):
        return functools.partial(spec.func, *spec.args, **{**spec.keywords, "submodules": submodules})
    return dataclasses.replace(spec, submodules=submodules)


def _with_linears(spec: Any, linears: dict[type, type]) -> Any:
    submodules = _submodules(spec)
    return spec if submodules is None else _with_submodules(spec, _replaced(submodules, linears))
