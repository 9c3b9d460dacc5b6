# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Puts the fast modules into Megatron-Core's local layer specs."""

import dataclasses
import functools
from typing import Any

from torch import Tensor

from nemo_rl_moe.models.megatron import cpu_backend  # noqa: F401  (before megatron.core)
from nemo_rl_moe.models.megatron.cpu_layers.attention import SDPAttention
from nemo_rl_moe.models.megatron.cpu_layers.cross_entropy import cross_entropy
from nemo_rl_moe.models.megatron.cpu_layers.dispatcher import LocalMoELayer
from nemo_rl_moe.models.megatron.cpu_layers.eligibility import eligible
from nemo_rl_moe.models.megatron.cpu_layers.experts import GroupedExperts
from nemo_rl_moe.models.megatron.cpu_layers.linear import PlainColumnLinear, PlainRowLinear
from nemo_rl_moe.models.megatron.cpu_layers.norm import RMSNorm
from nemo_rl_moe.models.megatron.cpu_layers.router import IndexTopKRouter
from nemo_rl_moe.models.megatron.cpu_layers.self_attention import FastSelfAttention
from nemo_rl_moe.models.megatron.cpu_layers.sink_attention import SinkAttention

# isort: split
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


@dataclasses.dataclass(frozen=True)
class BuildableSpec:
    """What a `ModuleSpec` says, without being one.

    The older TransformerLayer warns of every ModuleSpec whose class it does not know; it builds this all the same.
    """

    module: type
    submodules: Any
    params: dict[str, Any] = dataclasses.field(default_factory=dict)


def replace_norms(config: TransformerConfig, layer_spec: ModuleSpec) -> ModuleSpec:
    """A layer spec with this project's RMSNorm in place of the torch norm, which refuses sequence parallelism.

    Args:
        config: The model's configuration.
        layer_spec: A layer spec of Megatron-Core; it stays as it is.
    """
    if not eligible("norm", config):
        return layer_spec
    layer = layer_spec.submodules
    attention = layer.self_attention
    attention_submodules = _replaced(attention.submodules, {WrappedTorchNorm: RMSNorm})
    self_attention = dataclasses.replace(attention, submodules=attention_submodules)
    layer = dataclasses.replace(_replaced(layer, {WrappedTorchNorm: RMSNorm}), self_attention=self_attention)
    return dataclasses.replace(layer_spec, submodules=layer)


def fast_layer_spec(config: TransformerConfig, layer_spec: ModuleSpec) -> ModuleSpec:
    """A layer spec with every fast module that the configuration allows.

    Args:
        config: The model's configuration.
        layer_spec: Megatron-Core's local spec of a dense or a Mixture-of-Experts layer; it stays as it is, and so does
            every module in it that is not the stock one.
    """
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
    """A block's layers and its final norm, treated alike.

    Args:
        config: The model's configuration.
        block: For instance from `get_gpt_decoder_block_spec`; it stays as it is.
        fast: True for `fast_layer_spec`, False for `replace_norms` alone.
    """
    change = fast_layer_spec if fast else replace_norms
    layers = [change(config, layer_spec) for layer_spec in block.layer_specs]
    own_norm = block.layer_norm is WrappedTorchNorm and eligible("norm", config)
    return dataclasses.replace(block, layer_specs=layers, layer_norm=RMSNorm if own_norm else block.layer_norm)


class FastGPTModel(GPTModel):
    """`GPTModel` with a plain output layer and cross entropy where the configuration allows."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        output_layer = getattr(self, "output_layer", None)
        if type(output_layer) is ColumnParallelLinear and eligible("linear", config):
            # GPTModel takes no spec for it. Same parameters and attributes, only another forward pass.
            output_layer.__class__ = PlainColumnLinear

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Loss of each token, `[batch, sequence]`, of logits `[sequence, batch, vocabulary]`."""
        if eligible("cross_entropy", self.config):
            return cross_entropy(logits, labels)
        return super().compute_language_model_loss(labels, logits)


def _fast_linears(config: TransformerConfig) -> dict[type, type]:
    if not eligible("linear", config):
        return {}
    return {ColumnParallelLinear: PlainColumnLinear, RowParallelLinear: PlainRowLinear}


def _replaced(submodules: Any, replacements: dict[type, type]) -> Any:
    """A copy of a dataclass of submodules; classes among its values are replaced, everything else is kept."""
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


# Megatron-Core 0.16 describes an MLP with a ModuleSpec, 0.19 with functools.partial; each holds `submodules`.


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
