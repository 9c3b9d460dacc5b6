# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Problems of a model with its layout, its machine and the settings of a run, as messages."""

import importlib.util
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.models.layer_kinds import Mixer, recurrent_mixer
from nemo_rl_moe.models.megatron.cpu import cpu_backend
from nemo_rl_moe.models.megatron.model import transformer_engine
from nemo_rl_moe.models.megatron.model.stages import layers_of_chunks
from nemo_rl_moe.models.megatron.model.transformer_engine import use_transformer_engine

FIRST_ENGINE_WITH_PACKED_SINKS = (2, 12)
"""First release of Transformer Engine with a kernel for packed sequences with attention sinks (from cuDNN 9.18)."""
BIAS_RATE = "moe_router_bias_update_rate"
_NEEDING_DEEP_EP = ("deepep", "hybridep")
_KEY = "policy.megatron_cfg."


def layout_problems(policy: PolicyConfig, fields: dict[str, Any], *, has_vision: bool) -> list[str]:
    """Return the problems of the fields of a TransformerConfig with the layout, the machine and the policy's settings.

    `problems_with_experts` and `problems_without_experts` return the problems of experts.
    """
    return [
        *_problems_with_layers(fields),
        *_problems_with_fused_gradients(fields),
        *_problems_with_fused_cross_entropy(fields),
        *_problems_with_vision(policy, has_vision=has_vision),
        *_problems_with_shared_sequences(fields),
        *(_problems_with_packed_sinks(policy) if fields.get("softmax_type") == "learnable" else ()),
    ]


def problems_with_overrides(overrides: Mapping[str, Any], fields: Mapping[str, Any]) -> list[str]:
    """Return a message for each override that is on and makes this machine or model compute wrong numbers."""
    wrong = {}
    if fields.get("multi_latent_attention") or fields.get("mrope_section"):
        wrong["apply_rope_fusion"] = "the fused kernel takes wrong angles for this model"
    if cpu_backend.ACTIVE:
        why = "with interleaved stages, gloo then mixes up the tensors between stages, without an error"
        wrong |= {"batch_p2p_comm": why, "overlap_p2p_comm": why}
    return [
        f"{_KEY}model_overrides.{name}: got true, expected false: {why}"
        for name, why in wrong.items()
        if overrides.get(name)
    ]


def problem_with_deep_layers(config: TransformerConfig, num_deep: int) -> str | None:
    """Return a message if layers that add the tower's features are on another stage than the tower, otherwise None."""
    first = len(layers_of_chunks(config, 0)[0])
    if first >= num_deep:
        return None
    stages = config.pipeline_model_parallel_size
    name, got = "pipeline_model_parallel_size", str(stages)
    if virtual := config.virtual_pipeline_model_parallel_size:
        name, got = "virtual_pipeline_model_parallel_size", f"{virtual} on {stages} stages"
    elif config.num_layers_in_first_pipeline_stage is not None:
        name, got = "num_layers_in_first_pipeline_stage", str(first)
    return (
        f"{_KEY}{name}: got {got}, which leaves {first} of the model's {config.num_layers} layers on the stage of the "
        f"vision tower, expected {num_deep} or more: the tower adds features to the first {num_deep}"
    )


def _problems_with_vision(policy: PolicyConfig, *, has_vision: bool) -> list[str]:
    """Return the problems of settings for images, and of models or pipeline stages without any trained weight."""
    freeze, key = policy.freeze, "policy.freeze."
    shared = policy.megatron_cfg.context_parallel_size
    if has_vision and shared > 1:
        return [
            f"{_KEY}context_parallel_size: got {shared}, expected 1 for a vision-language model: ranks"
            " cannot share an image"
        ]
    if not has_vision:
        why = "the model takes no images: its language model is its only part"
        budgets = {name: getattr(policy, name).train_mb_patches for name in ("sequence_packing", "dynamic_batching")}
        return [f"{key}{name}: got true, expected false: {why}" for name, value in freeze if value] + [
            f"policy.{name}.train_mb_patches: got {most}, expected null: the model takes no images"
            for name, most in budgets.items()
            if most is not None
        ]
    if not freeze.language_model:
        return []
    if freeze.vision_tower and freeze.projector:
        return [f"{key}vision_tower, projector and language_model: got true for each, which leaves nothing to train"]
    if rate := policy.megatron_cfg.moe_transformer_fields.get(BIAS_RATE):
        return [
            f"{_KEY}{BIAS_RATE}: got {rate}, expected 0.0 or nothing with {key}language_model true, which"
            " leaves the expert bias as it is"
        ]
    if (stages := policy.megatron_cfg.pipeline_model_parallel_size) > 1:
        return [
            f"{key}language_model: got true, expected false with {_KEY}pipeline_model_parallel_size "
            f"{stages}: nothing would train on the stages after the first"
        ]
    return []


def _problems_with_packed_sinks(policy: PolicyConfig) -> list[str]:
    """Return a message if sequences are packed and Transformer Engine has no kernel for attention sinks in packs."""
    found, first = transformer_engine.release(), FIRST_ENGINE_WITH_PACKED_SINKS
    # Zeros are an unknown release.
    is_too_old = use_transformer_engine(policy) and (0, 0) < found < first
    if not policy.sequence_packing.enabled or not is_too_old:
        return []
    return [
        f"policy.sequence_packing.enabled: got true, but Transformer Engine {found[0]}.{found[1]} has no kernel for"
        " packed sequences with the model's attention sinks; expected false, or Transformer Engine"
        f" {first[0]}.{first[1]} or newer"
    ]


def _problems_with_shared_sequences(fields: dict[str, Any]) -> list[str]:
    """Return the problems of context parallelism with attention that Transformer Engine does not compute in a ring.

    Other forms of communication than a ring are untested here.
    """
    ranks = fields["context_parallel_size"]
    if ranks == 1:
        return []
    of_model = {"windows": fields.get("window_size") is not None, "sinks": fields.get("softmax_type") == "learnable"}
    problems = []
    if (mixer := recurrent_mixer(SimpleNamespace(**fields))) is not None:
        problems.append(
            f"{_KEY}context_parallel_size: got {ranks}, expected 1: ranks cannot share sequences of a model with"
            f" {mixer.value}, whose state passes from token to token"
        )
    if names := " and ".join(name for name, has_some in of_model.items() if has_some):
        problems.append(
            f"{_KEY}context_parallel_size: got {ranks}, expected 1: ranks cannot share sequences of a model with"
            f" attention {names}"
        )
    if (way := fields.get("cp_comm_type")) not in (None, "p2p"):
        problems.append(
            f"{_KEY}model_overrides.cp_comm_type: got {way!r}, expected 'p2p' with {_KEY}context_parallel_size {ranks}"
        )
    return problems


def _problems_with_fused_gradients(fields: dict[str, Any]) -> list[str]:
    """Return a message if fused accumulation of weight gradients is on, but its kernel is not installed."""
    if not fields["gradient_accumulation_fusion"] or importlib.util.find_spec("fused_weight_gradient_mlp_cuda"):
        return []
    return [
        f"{_KEY}model_overrides.gradient_accumulation_fusion: got true, which needs Apex's extension"
        " fused_weight_gradient_mlp_cuda, which is not installed; expected false"
    ]


def _problems_with_fused_cross_entropy(fields: dict[str, Any]) -> list[str]:
    """Return a message if float32 training uses Megatron-Core's fused cross entropy, which rounds to bfloat16."""
    is_native = fields.get("cross_entropy_fusion_impl", "native") == "native"
    if not fields.get("cross_entropy_loss_fusion") or not is_native or fields["params_dtype"] is torch.bfloat16:
        return []
    return [
        f"{_KEY}model_overrides.cross_entropy_loss_fusion: got true with policy.precision float32, but the "
        "kernel rounds gradients to bfloat16; expected false"
    ]


def _problems_with_layers(fields: dict[str, Any]) -> list[str]:
    """Return a message for each size of the model that the pipeline or tensor-parallel layout does not divide."""
    tensor = fields["tensor_model_parallel_size"]
    sizes = {"query heads": fields["num_attention_heads"], "key and value heads": fields["num_query_groups"]}
    mixer = recurrent_mixer(SimpleNamespace(**fields))
    if mixer is Mixer.DELTA_NET:
        sizes["linear key heads"] = fields["linear_num_key_heads"]
    if mixer is Mixer.MAMBA:
        sizes["groups of Mamba-2 heads"] = fields["mamba_num_groups"]
    if fields.get("multi_latent_attention"):
        # Megatron-Core splits the projections to the latents, before full projections replace them.
        sizes["query latents (q_lora_rank)"] = fields["q_lora_rank"] or 0
        latents = fields["kv_lora_rank"] + fields["qk_pos_emb_head_dim"]
        sizes["key and value latents (kv_lora_rank + qk_rope_head_dim)"] = latents
    return _problems_with_stages(fields) + [
        f"{_KEY}tensor_model_parallel_size: got {tensor}, which does not divide the model's {number} {kind}"
        for kind, number in sizes.items()
        if number % tensor
    ]


def _problems_with_stages(fields: dict[str, Any]) -> list[str]:
    """Return the problems of layers that cannot be divided among pipeline stages, with a possible division if any."""
    layers, stages = fields["num_layers"], fields["pipeline_model_parallel_size"]
    pieces = fields["virtual_pipeline_model_parallel_size"] or 1
    names = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
    given = {name: fields[name] for name in names if fields[name] is not None}
    if not given:
        if layers % (stages * pieces) == 0:
            return []
        return [
            f"{_KEY}pipeline_model_parallel_size: got {stages} (x {pieces} virtual stages), which does not divide "
            f"the model's {layers} layers{_uneven_stages(layers, stages, pieces)}"
        ]
    if stages < 2:
        return [
            f"{_KEY}{name}: got {value}, which needs {_KEY}pipeline_model_parallel_size above 1"
            for name, value in given.items()
        ]
    problems = [
        f"{_KEY}{name}: got {value}, which is no multiple of {_KEY}virtual_pipeline_model_parallel_size {pieces}"
        for name, value in given.items()
        if value % pieces
    ]
    left, others = layers - sum(given.values()), stages - len(given)
    if left != 0 if not others else left < 1 or left % (others * pieces):
        reported = " and ".join(f"{name} {value}" for name, value in given.items())
        rest = f"the rest cannot be divided evenly among {others} other stages (x {pieces} virtual stages)"
        problems.append(
            f"{_KEY}{reported}: the model has {layers} layers, and {rest if others else 'there are no other stages'}"
            f"{_uneven_stages(layers, stages, pieces)}"
        )
    return problems


def _uneven_stages(layers: int, stages: int, pieces: int) -> str:
    """Return advice on the layers of the first and the last stage, or an empty string if none is possible.

    Neither stage gets more layers than a stage in between. The last stage, which has the output layer, gets the fewest
    layers.
    """
    if stages < 2 or layers % pieces:
        return ""
    rounds = layers // pieces
    between = -(-rounds // stages)
    ends = rounds - between * (stages - 2)
    if ends < 2:
        return ""
    first = -(-ends // 2)
    return (
        f"; expected, for one, num_layers_in_first_pipeline_stage={first * pieces}"
        f" num_layers_in_last_pipeline_stage={(ends - first) * pieces}"
    )


def problems_with_experts(fields: dict[str, Any], *, grouped_kernels: bool, chooses_groups: bool) -> list[str]:
    """Return the problems of experts that do not divide evenly, are too few, or lack kernels.

    Args:
        chooses_groups: Whether the family's routers choose among groups of experts.
    """
    expert, experts = fields["expert_model_parallel_size"], fields["num_moe_experts"]
    topk = fields["moe_router_topk"]
    problems = []
    if experts % expert:
        problems.append(
            f"{_KEY}expert_model_parallel_size: got {expert}, which does not divide the model's {experts} experts"
        )
    capacity = fields.get("moe_expert_capacity_factor") or 0.0
    if fields.get("moe_pad_expert_input_to_capacity") and capacity * topk > experts:
        problems.append(
            f"{_KEY}moe_expert_capacity_factor: got {capacity:g}, expected at most {experts / topk:g} with"
            f" {_KEY}moe_pad_expert_input_to_capacity true: an expert cannot be padded to more tokens than there are"
        )
    if fields.get("moe_latent_size") and cpu_backend.ACTIVE:
        problems.append(
            f"{_KEY}moe_latent_size: got {fields['moe_latent_size']}, expected null on CPUs: its projections are layers"
            " of Transformer Engine"
        )
    if fields["moe_router_load_balancing_type"] == "sinkhorn" and fields["moe_aux_loss_coeff"]:
        problems.append(
            f"{_KEY}moe_aux_loss_coeff: got {fields['moe_aux_loss_coeff']}, expected 0 with"
            f" {_KEY}moe_router_load_balancing_type sinkhorn, which has no loss"
        )
    if topk > experts:
        problems.append(f"{_KEY}moe_router_topk: got {topk}, expected at most the model's {experts} experts")
    # All experts of a token must be on the hot rank.
    if fields["moe_router_force_hot_rank"] is not None and topk > experts // expert:
        problems.append(
            f"{_KEY}moe_router_force_hot_rank: each rank holds {experts // expert} experts of a layer, fewer "
            f"than the {topk} that each token goes to; use a smaller expert_model_parallel_size"
        )
    if topk == 1 and fields["moe_router_score_function"] == "softmax" and not fields["moe_router_pre_softmax"]:
        problems.append(
            f"{_KEY}moe_router_topk: got 1, with weights that add up to 1 over a token's experts: nothing would train "
            f"the router; expected 2 or more, or {_KEY}moe_router_pre_softmax=true"
        )
    if fields["moe_grouped_gemm"] and not grouped_kernels:
        problems.append(f"{_KEY}moe_grouped_gemm: got true, which needs Transformer Engine; leave it out")
    problems += _problems_with_dispatcher(fields, on_gpus=not cpu_backend.ACTIVE)
    return problems + (_problems_with_groups(fields) if chooses_groups else [])


def _problems_with_dispatcher(fields: dict[str, Any], *, on_gpus: bool) -> list[str]:
    """Return a message if the flex dispatcher lacks its library: Megatron-Core would only raise in an MoE layer."""
    backend = fields.get("moe_flex_dispatcher_backend", "deepep")
    if not on_gpus or fields["moe_token_dispatcher_type"] != "flex" or backend not in _NEEDING_DEEP_EP:
        return []
    if importlib.util.find_spec("deep_ep") is not None:
        return []
    return [
        f"{_KEY}moe_token_dispatcher_type: got flex with moe_flex_dispatcher_backend {backend}, which"
        " needs the package deep_ep, which is not installed; expected alltoall"
    ]


def _problems_with_groups(fields: dict[str, Any]) -> list[str]:
    """Return a message if the fused router kernel would choose groups of experts by another rule than the model."""
    if not fields.get("moe_router_fusion") or not fields["moe_router_group_topk"]:
        return []
    return [
        f"{_KEY}moe_router_fusion: got true, but its kernel chooses groups of experts by another rule than the model;"
        " leave it out"
    ]


def problems_without_experts(policy: PolicyConfig) -> list[str]:
    """Return the problems of settings that need experts. `moe_*` fields have no effect here, and are allowed."""
    megatron = policy.megatron_cfg
    expert, hot_rank = megatron.expert_model_parallel_size, megatron.moe_router_force_hot_rank
    why = "the model has no experts"
    problems = []
    if expert > 1:
        problems.append(f"{_KEY}expert_model_parallel_size: got {expert}, expected 1: {why}")
    if hot_rank is not None:
        problems.append(f"{_KEY}moe_router_force_hot_rank: got {hot_rank}, expected null: {why}")
    if megatron.activation_checkpointing == "moe":
        problems.append(f"{_KEY}activation_checkpointing: got 'moe', expected none or full: {why}")
    return problems
