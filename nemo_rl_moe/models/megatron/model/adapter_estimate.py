# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Number of adapter parameters on each worker, by arithmetic, without building a model."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_rl_moe.config.schema_lora import LoraConfig
from nemo_rl_moe.models.families import family_of
from nemo_rl_moe.models.families.linear_targets import PLACES, ROUTED_EXPERTS, chosen_sources
from nemo_rl_moe.models.layer_kinds import Mixer, mixers_of
from nemo_rl_moe.models.megatron.layers.recurrent_sizes import recurrent_sizes
from nemo_rl_moe.routing.routers import moe_layer_indices

_MIB = 1 << 20


@dataclass(frozen=True)
class _Linear:
    """Sizes of a linear layer.

    Attributes:
        cut: Dimension that is split among ranks, `"inputs"` or `"outputs"`. None if every rank holds the full layer.
    """

    inputs: int
    outputs: int
    cut: str | None


def adapter_parameters(
    config: TransformerConfig, hf_config: Any, lora: LoraConfig, layers: Iterable[tuple[int, bool]]
) -> tuple[int, int]:
    """Count the adapter parameters of a rank.

    Args:
        layers: Index of each of the rank's layers, and whether it has experts.

    Returns:
        Two counts. The second is of factors that belong to a single routed expert, the first of all other factors.
    """
    dense = experts = 0
    for index, has_experts in layers:
        for place in PLACES:
            linear = _linear(config, place, index, has_experts=has_experts)
            if linear is None:
                continue
            is_routed = place.startswith(f"{ROUTED_EXPERTS}.")
            if is_routed and lora.experts == "none":
                continue
            ranks = config.expert_tensor_parallel_size or 1 if is_routed else config.tensor_model_parallel_size
            count = _count(place, linear, lora, index, hf_config, ranks)
            if is_routed and lora.experts == "per_expert":
                experts += count * (config.num_moe_experts // config.expert_model_parallel_size)
            else:
                dense += count
    return dense, experts


def rounding_of_frozen_experts(config: TransformerConfig, layers: Iterable[int]) -> int:
    """Return the bytes that torch's allocator adds to the matrices of the experts in these layers of a rank.

    Trained weights are parts of one buffer, but each frozen matrix is a separate tensor.
    """
    num_layers = len({*layers} & {*moe_layer_indices(config)})
    if not num_layers:
        return 0
    outputs = 2 if config.gated_linear_unit else 1
    of_routed = (config.moe_latent_size or config.hidden_size) * config.moe_ffn_hidden_size
    routed = of_routed // (config.expert_tensor_parallel_size or 1) * config.params_dtype.itemsize
    added = config.num_moe_experts // config.expert_model_parallel_size * (_added(outputs * routed) + _added(routed))
    if config.moe_shared_expert_intermediate_size is not None:
        of_shared = config.hidden_size * config.moe_shared_expert_intermediate_size
        shared = of_shared // config.tensor_model_parallel_size * config.params_dtype.itemsize
        added += _added(outputs * shared) + _added(shared)
    return num_layers * added


def _added(num_bytes: int) -> int:
    """Return the bytes by which torch's allocator rounds up.

    From 10 MiB on (`kMinLargeAlloc` of CUDACachingAllocator) a tensor gets memory in units of 2 MiB (`kRoundLarge`). A
    rest above 1 MiB (`kSmallSize`) goes to other tensors.
    """
    rest = -num_bytes % (2 * _MIB)
    return rest if num_bytes >= 10 * _MIB and rest <= _MIB else 0


def _count(place: str, linear: _Linear, lora: LoraConfig, layer: int, hf_config: Any, ranks: int) -> int:
    name = place.replace(ROUTED_EXPERTS, f"{ROUTED_EXPERTS}.0")
    rule = family_of(hf_config).rules.find(f"decoder.layers.{layer}.{name}.weight")
    assert rule is not None  # each place with sizes has a rule
    names = chosen_sources(place, rule, lora.targets)
    parts = rule.layout.split(torch.empty(linear.outputs, 1, device="meta"), len(names), hf_config)
    inputs = linear.inputs // ranks if linear.cut == "inputs" else linear.inputs
    divisor = ranks if linear.cut == "outputs" else 1
    outputs = sum(len(part) // divisor for part, chosen in zip(parts, names, strict=True) if chosen)
    return lora.rank * (inputs * len({*names} - {None}) + outputs)


def _linear(config: TransformerConfig, place: str, layer: int, *, has_experts: bool) -> _Linear | None:
    """Return the sizes of the linear layer with this name, or None if this decoder layer does not have it."""
    if place.startswith("self_attention."):
        of_kind = _latent_attention if config.multi_latent_attention else _attention
        return (of_kind if mixers_of(config)[layer] is Mixer.ATTENTION else _recurrent)(config).get(place)
    if place == "mlp.router":
        return _Linear(config.hidden_size, config.num_moe_experts, None) if has_experts else None
    kind, _, linear = place.rpartition(".")
    width = {
        "mlp": None if has_experts else config.ffn_hidden_size,
        "mlp.shared_experts": config.moe_shared_expert_intermediate_size if has_experts else None,
        ROUTED_EXPERTS: config.moe_ffn_hidden_size if has_experts else None,
    }[kind]
    if width is None:
        return None
    hidden = config.hidden_size
    return _Linear(hidden, 2 * width, "outputs") if linear == "linear_fc1" else _Linear(width, hidden, "inputs")


def _attention(config: TransformerConfig) -> dict[str, _Linear]:
    queries, keys = (n * config.kv_channels for n in (config.num_attention_heads, config.num_query_groups))
    outputs = (2 if config.attention_output_gate else 1) * queries + 2 * keys
    return {
        "self_attention.linear_qkv": _Linear(config.hidden_size, outputs, "outputs"),
        "self_attention.linear_proj": _Linear(queries, config.hidden_size, "inputs"),
    }


def _recurrent(config: TransformerConfig) -> dict[str, _Linear]:
    sizes = recurrent_sizes(config, tensor=1)
    return {
        "self_attention.in_proj": _Linear(config.hidden_size, sum(sizes.projected), "outputs"),
        "self_attention.out_proj": _Linear(sizes.values, config.hidden_size, "inputs"),
    }


def _latent_attention(config: TransformerConfig) -> dict[str, _Linear]:
    heads, hidden = config.num_attention_heads, config.hidden_size
    queries = heads * (config.qk_head_dim + config.qk_pos_emb_head_dim)
    latents = config.kv_lora_rank + config.qk_pos_emb_head_dim
    found = {
        "kv_down_proj": _Linear(hidden, latents, None),
        "kv_up_proj": _Linear(config.kv_lora_rank, heads * (config.qk_head_dim + config.v_head_dim), "outputs"),
        "proj": _Linear(heads * config.v_head_dim, hidden, "inputs"),
    }
    if config.q_lora_rank is None:
        found["q_proj"] = _Linear(hidden, queries, "outputs")
    else:
        found["q_down_proj"] = _Linear(hidden, config.q_lora_rank, None)
        found["q_up_proj"] = _Linear(config.q_lora_rank, queries, "outputs")
    return {f"self_attention.linear_{name}": linear for name, linear in found.items()}
