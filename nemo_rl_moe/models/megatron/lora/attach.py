# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Adapters of a model: choice of layers, initial values, and the frozen base."""

import math
import re
import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from nemo_rl_moe.config.schema_lora import LoraConfig
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.families import family_of
from nemo_rl_moe.models.families.linear_targets import PLACES, ROUTED_EXPERTS, chosen_sources
from nemo_rl_moe.models.families.rules import Rule
from nemo_rl_moe.models.megatron.cpu.moe import IndexTopKRouter
from nemo_rl_moe.models.megatron.lora.adapter import INPUTS, OUTPUTS, Adapter, Base, Switch, adapters_in
from nemo_rl_moe.models.megatron.lora.checkpoint_names import PREFIX
from nemo_rl_moe.models.megatron.lora.experts import add_to_output, attach_to_experts
from nemo_rl_moe.models.megatron.lora.transfer import FactorPart, factor_parts

_NORM_WEIGHT = "layer_norm_weight"


def add_adapters(
    chunks: Sequence[GPTModel], config: TransformerConfig, hf_config: Any, lora: LoraConfig, seed: int
) -> Switch:
    """Freeze a model with loaded weights, attach trainable adapters to its layers, and return their switch.

    A value head stays trainable.

    Args:
        seed: Seed of the adapters' random values, which also depend on names, but not on the layout.
    """
    switch = Switch()
    for chunk in chunks:
        chunk.requires_grad_(False)
        if chunk.has_value_head:
            chunk.value_head.requires_grad_(True)
        for layer in chunk.decoder.layers:
            _adapt_layer(layer, config, hf_config, lora, switch)
        if chunk.pre_process:
            # Activation checkpointing computes gradients only if its inputs require one.
            chunk.embedding.register_forward_hook(_want_gradient)
    _require_adapters_everywhere(len(adapters_in(chunks)))
    for part in factor_parts(chunks):
        if part.factor.name.endswith("lora_A"):  # `B` stays zero
            part.local.copy_(part.slice_of(_sampled(part, lora, seed)))
    return switch


def _require_adapters_everywhere(num_adapters: int) -> None:
    """Raise an error on every rank if a rank has nothing to train."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, num_adapters)
    if 0 in found:
        raise ConfigurationError(
            f"policy.lora.targets: no layer of the pipeline stage of rank {found.index(0)} gets an adapter, so nothing "
            "would train there; add targets that every stage has, or use fewer stages"
        )


def _want_gradient(module: nn.Module, inputs: Any, output: Tensor) -> None:
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_(True)


def _adapt_layer(layer: Any, config: TransformerConfig, hf_config: Any, lora: LoraConfig, switch: Switch) -> None:
    modules = dict(layer.named_modules())
    of_experts: dict[str, Adapter] = {}
    for place in PLACES:
        is_routed = place.startswith(f"{ROUTED_EXPERTS}.")
        if is_routed and (ROUTED_EXPERTS not in modules or lora.experts == "none"):
            continue
        if not is_routed and place not in modules:
            continue
        module = modules[ROUTED_EXPERTS] if is_routed else modules[place]
        base = _base(place, module, layer.layer_number - 1, config, hf_config, lora)
        if base is None:
            continue
        adapter = Adapter(base, hf_config, lora, switch, config.params_dtype)
        if is_routed:
            of_experts[place.rpartition(".")[2]] = adapter
        elif place == "mlp.router":
            _attach_to_router(module, adapter)
        else:
            _attach_to_linear(module, adapter)
    if of_experts:
        attach_to_experts(modules[ROUTED_EXPERTS], of_experts)


def _base(
    place: str, module: Any, layer: int, config: TransformerConfig, hf_config: Any, lora: LoraConfig
) -> Base | None:
    """Return the description of a layer, or None if the configuration does not ask for an adapter of the layer."""
    is_routed = place.startswith(f"{ROUTED_EXPERTS}.")
    rule = _rule(place, layer, hf_config)
    names = chosen_sources(place, rule, lora.targets)
    if not any(names):
        return None
    modules = tuple(
        _module_name(source.name, is_routed=is_routed) if name else None
        for source, name in zip(rule.sources, names, strict=True)
    )
    weights = _weights_of_experts(module, place.rpartition(".")[2]) if is_routed else (module.weight,)
    outputs, inputs = weights[0].shape[-2:]
    cut, num_shards, shard_rank = _cut(weights[0], place)
    return Base(
        weights=weights,
        shape=(outputs, inputs),
        modules=modules,
        names=tuple(names),
        layout=rule.layout,
        cut=cut,
        num_shards=num_shards,
        shard_rank=shard_rank,
        experts=_experts(config) if is_routed else None,
        config=config,
    )


def _module_name(tensor: str, *, is_routed: bool) -> str:
    """Return the name of a tensor's module. For routed experts it has `{expert}`, even if the tensor holds them all."""
    module = tensor.removesuffix(".weight")
    if not is_routed:
        return module
    return re.sub(r"\.experts\.(0\.)?", ".experts.{expert}.", module)


def _rule(place: str, layer: int, hf_config: Any) -> Rule:
    linear = place.replace(ROUTED_EXPERTS, f"{ROUTED_EXPERTS}.0")
    rule = family_of(hf_config).rules.find(f"decoder.layers.{layer}.{linear}.weight")
    assert rule is not None  # import and export need the rule too
    return rule


def _weights_of_experts(experts: Any, linear: str) -> tuple[Tensor, ...]:
    """Return the weights of this rank's experts: one tensor with all of them, or a tensor for each expert."""
    parameters = dict(experts.named_parameters())
    if f"{linear}_weights" in parameters:
        return (parameters[f"{linear}_weights"],)
    one_by_one = [f"local_experts.{index}.{linear}.weight" for index in range(experts.num_local_experts)]
    if one_by_one[0] not in parameters:
        one_by_one = [f"{linear}.weight{index}" for index in range(experts.num_local_experts)]
    return tuple(parameters[name] for name in one_by_one)


def _experts(config: TransformerConfig) -> tuple[int, int, int]:
    num_local = config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
    return parallel_state.get_expert_model_parallel_rank() * num_local, num_local, config.num_moe_experts


def _cut(weight: Any, place: str) -> tuple[int | None, int, int]:
    """Return the sharded dimension of a matrix, the number of shards, and the index of this rank's shard."""
    if place.startswith(f"{ROUTED_EXPERTS}."):
        size = parallel_state.get_expert_tensor_parallel_world_size()
        cut = OUTPUTS if place.endswith("linear_fc1") else INPUTS
        return (cut, size, parallel_state.get_expert_tensor_parallel_rank()) if size > 1 else (None, 1, 0)
    size = parallel_state.get_tensor_model_parallel_world_size()
    if size == 1 or not getattr(weight, "tensor_model_parallel", False):
        return None, size, 0
    return weight.partition_dim, size, parallel_state.get_tensor_model_parallel_rank()


def _attach_to_linear(linear: Any, adapter: Adapter) -> None:
    linear.adapter = adapter
    norm_weight, eps = dict(linear.named_parameters(recurse=False)).get(_NORM_WEIGHT), getattr(linear, "eps", None)
    is_centered = getattr(linear, "zero_centered_gamma", False)

    def term(rows: Tensor, *_others: Any) -> Tensor:
        if norm_weight is not None:  # Transformer Engine has the norm inside the next linear layer
            weight = norm_weight + 1 if is_centered else norm_weight
            rows = nn.functional.rms_norm(rows, weight.shape, weight, eps)
        return adapter.of_linear(rows)

    add_to_output(linear, adapter, term)


def _attach_to_router(router: Any, adapter: Adapter) -> None:
    router.adapter = adapter
    gating = router.gating

    def gating_with_term(inputs: Tensor) -> Tensor:
        logits: Tensor = gating(inputs)
        if not adapter.switch.is_on:
            return logits
        return logits + adapter.of_router(inputs, logits.dtype)

    router.gating = gating_with_term
    if isinstance(router, IndexTopKRouter):
        router.is_plain = False


def _sampled(part: FactorPart, lora: LoraConfig, seed: int) -> Tensor:
    """Return random initial values of a full factor `A`, `[rank, inputs]`, the same in every layout."""
    # The seed of a factor that experts share depends on its name with `{expert}` in it.
    name = part.name.removeprefix(PREFIX).removesuffix(".weight") if part.factor.is_stacked else part.factor.name
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) ^ zlib.crc32(str(seed).encode()))
    rank, inputs = part.shape
    if lora.init == "gaussian":
        return torch.randn(rank, inputs, generator=generator) / rank
    # As in torch's linear layers and peft: kaiming_uniform_ with a = sqrt(5).
    bound = 1 / math.sqrt(inputs)
    return torch.empty(rank, inputs).uniform_(-bound, bound, generator=generator)
