# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The effective TransformerConfig, and its consequences: layers of the stages, auxiliary losses, problems."""

import importlib.metadata
import importlib.util
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.distributed.install_transformer_engine import problem_with_extension
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.families import family_of
from nemo_rl_moe.models.families.linear_targets import target_problems
from nemo_rl_moe.models.megatron.cpu import cpu_backend
from nemo_rl_moe.models.megatron.layers.routers import FORCED_ROUTING_FIELDS, forced_routing_in_force
from nemo_rl_moe.models.megatron.model.model_overrides import read_overrides
from nemo_rl_moe.models.megatron.model.releases import MEGATRON_VERSION, transformer_config_fields
from nemo_rl_moe.models.megatron.model.shared_prefix import problems_with_shared_prefix
from nemo_rl_moe.routing.routers import moe_layer_indices

Z_LOSS = "z_loss"
GLOBAL_BATCH_LOSS = "global_load_balancing_loss"
NAME_OF_BALANCING_TYPE = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": GLOBAL_BATCH_LOSS,
}
"""Balancing type -> name of its loss in Megatron-Core's tracker, in a fixed order."""
AUXILIARY_LOSSES = (*NAME_OF_BALANCING_TYPE.values(), Z_LOSS)
"""Names of all auxiliary losses in Megatron-Core's tracker."""
_KEY = "policy.megatron_cfg."


def auxiliary_loss_names(config: TransformerConfig) -> list[str]:
    """Return the names of the losses that this model's routers record, in the same order on all ranks."""
    types, coefficients = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    if isinstance(types, str):
        types, coefficients = [types], [coefficients]
    enabled = {kind for kind, coefficient in zip(types, coefficients, strict=True) if coefficient > 0}
    names = [name for kind, name in NAME_OF_BALANCING_TYPE.items() if kind in enabled]
    return [*names, Z_LOSS] if config.moe_z_loss_coeff is not None else names


def layers_of_stages(config: TransformerConfig) -> list[int]:
    """Return the number of decoder layers of each pipeline stage, by Megatron-Core's rule."""
    stages = config.pipeline_model_parallel_size
    ends = {0: config.num_layers_in_first_pipeline_stage, stages - 1: config.num_layers_in_last_pipeline_stage}
    given = {stage: layers for stage, layers in ends.items() if layers is not None}
    others = stages - len(given)
    each = (config.num_layers - sum(given.values())) // others if others else 0
    return [given.get(stage, each) for stage in range(stages)]


def attention_windows(config: TransformerConfig) -> list[int | None]:
    """Return, for each layer with attention, the number of keys that a query sees (also its own), or None for all."""
    size, frequency = config.window_size, config.window_attn_skip_freq
    linear = linear_layer_indices(config)
    numbers = [index + 1 for index in range(config.num_layers) if index not in linear]
    return [size[0] + 1 if is_layer_window_attention(size, frequency, number) else None for number in numbers]


def linear_layer_indices(config: TransformerConfig) -> list[int]:
    """Return the layers with a gated delta net instead of attention.

    They do not use Megatron-Core's `experimental_attention_variant`, because layers of that variant cannot generate.
    """
    return [index for index, is_linear in enumerate(config.linear_attention_freq or ()) if is_linear]


def layers_of_chunks(config: TransformerConfig, pipeline_rank: int) -> list[range]:
    """Return the global 0-based indices of the decoder layers of each model chunk of a pipeline stage."""
    chunks = config.virtual_pipeline_model_parallel_size or 1
    layers_of_chunk = [layers // chunks for layers in layers_of_stages(config)]
    before = sum(layers_of_chunk[:pipeline_rank])
    # Interleaved: the first chunks of all stages hold the first layers, and so on.
    starts = [chunk * sum(layers_of_chunk) + before for chunk in range(chunks)]
    return [range(start, start + layers_of_chunk[pipeline_rank]) for start in starts]


def moe_positions_of_chunks(config: TransformerConfig, pipeline_rank: int) -> list[list[int]]:
    """Return the positions in `moe_layer_indices` of the MoE layers of each model chunk of a pipeline stage."""
    positions = {index: position for position, index in enumerate(moe_layer_indices(config))}
    return [[positions[i] for i in layers if i in positions] for layers in layers_of_chunks(config, pipeline_rank)]


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": torch.nn.functional.silu, "quick_gelu": quick_gelu}
"""Activation functions by the names that model families use."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

BIAS_RATE = "moe_router_bias_update_rate"
_NEEDING_DEEP_EP = ("deepep", "hybridep")

_RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}


def has_transformer_engine() -> bool:
    """Return whether Transformer Engine is installed, on a machine with an accelerator."""
    return not cpu_backend.ACTIVE and importlib.util.find_spec("transformer_engine") is not None


def require_transformer_engine() -> None:
    """Raise an error if an accelerator's Transformer Engine is not installed or was compiled for another torch.

    Without Transformer Engine, Megatron-Core 0.16.1 fails in the first MoE layer with a NameError (`te_general_gemm`).
    """
    if cpu_backend.ACTIVE:
        return
    if not has_transformer_engine():
        raise ConfigurationError(
            "cluster.gpus_per_node: training on GPUs needs Transformer Engine, which is not installed: "
            "install it with `make gpu`, or train on CPUs with gpus_per_node=0"
        )
    if problem := problem_with_extension():
        raise ConfigurationError(f"cluster.gpus_per_node: {problem}; or train on CPUs with gpus_per_node=0")


def _transformer_engine_version() -> tuple[int, ...]:
    """Return the first two numbers of Transformer Engine's release, or zeros if they are unknown."""
    try:
        found = re.match(r"(\d+)\.(\d+)", importlib.metadata.version("transformer-engine"))
    except importlib.metadata.PackageNotFoundError:  # built from its sources, without a package
        found = None
    return (int(found[1]), int(found[2])) if found else (0, 0)


FIRST_ENGINE_WITH_PACKED_SINKS = (2, 12)
"""First release of Transformer Engine with a kernel for packed sequences with attention sinks (from cuDNN 9.18)."""


def use_transformer_engine(policy: PolicyConfig) -> bool:
    return policy.megatron_cfg.layer_spec == "auto" and has_transformer_engine()


def _layout_fields(policy: PolicyConfig) -> dict[str, Any]:
    megatron = policy.megatron_cfg
    return {
        "tensor_model_parallel_size": megatron.tensor_model_parallel_size,
        "pipeline_model_parallel_size": megatron.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": megatron.virtual_pipeline_model_parallel_size,
        "num_layers_in_first_pipeline_stage": megatron.num_layers_in_first_pipeline_stage,
        "num_layers_in_last_pipeline_stage": megatron.num_layers_in_last_pipeline_stage,
        "expert_model_parallel_size": megatron.expert_model_parallel_size,
        "expert_tensor_parallel_size": megatron.expert_tensor_parallel_size,
        "context_parallel_size": megatron.context_parallel_size,
        "sequence_parallel": megatron.sequence_parallel,
    }


def _implementation_fields(policy: PolicyConfig) -> dict[str, Any]:
    """Return the fields of TransformerConfig that select number formats and kernels for this machine."""
    dtype = DTYPES[policy.precision]
    fused = use_transformer_engine(policy)
    return {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        # This project sets the weights afterwards, the same in every layout. But Megatron's initialisation marks
        # parameters as tensor-parallel, and the gradient norm depends on that mark.
        "perform_initialization": True,
        "use_cpu_initialization": cpu_backend.ACTIVE,
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": fused,
        "bias_dropout_fusion": fused,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": fused,
        "persist_layer_norm": fused,
        "moe_grouped_gemm": fused,
        # Without this fusion, the host waits for the counts of each MoE layer.
        "moe_permute_fusion": fused and _transformer_engine_version() >= (2, 1),
        # Each of these two options changes the loss under gloo with interleaved stages, without an error.
        "batch_p2p_comm": not cpu_backend.ACTIVE,
        "overlap_p2p_comm": False,
        "deallocate_pipeline_outputs": True,
        # Microbatches of a pipeline are padded to one length.
        "variable_seq_lengths": False,
    }


def build_transformer_config(policy: PolicyConfig, hf_config: Any) -> TransformerConfig:
    """Build the effective TransformerConfig: the model's fields, then the machine's, then the user's `moe_*` fields."""
    family = family_of(hf_config)
    fields = family.transformer_fields(hf_config)
    fields["activation_func"] = ACTIVATIONS[fields["activation_func"]]
    of_the_machine = _implementation_fields(policy)
    of_the_model = fields.keys() - of_the_machine.keys()
    fields |= of_the_machine | _layout_fields(policy)
    if fields.get("multi_latent_attention") or fields.get("mrope_section"):
        # With latent attention, Transformer Engine refuses this fusion, or its kernel dies at the first prefill. With
        # 3D positions, its kernel rotates all packed sequences by the angles of the first sequence.
        fields["apply_rope_fusion"] = False
    if fields["add_bias_linear"]:
        # Transformer Engine's experts refuse this fusion if they have biases.
        fields["bias_dropout_fusion"] = False
    fields |= _RECOMPUTE[policy.megatron_cfg.activation_checkpointing]
    overrides = read_overrides(policy.megatron_cfg.model_overrides, of_the_model)
    problems = _problems_with_overrides(overrides, fields)
    fields |= overrides
    chosen = policy.megatron_cfg.moe_transformer_fields
    problems += [
        f"{_KEY}{name}: megatron-core {MEGATRON_VERSION} has no such field"
        for name in chosen
        if name not in transformer_config_fields() and name not in FORCED_ROUTING_FIELDS
    ]
    problems += _problems_with_layers(fields)
    problems += _problems_with_fused_gradients(fields)
    problems += _problems_with_fused_cross_entropy(fields)
    problems += _problems_with_vision(policy, has_vision=family.vision is not None)
    problems += _problems_with_shared_sequences(fields)
    problems += problems_with_shared_prefix(policy, fields, has_vision=family.vision is not None)
    problems += [] if policy.lora is None else target_problems(policy.lora, hf_config)
    if fields.get("softmax_type") == "learnable":
        problems += _problems_with_packed_sinks(policy)
    if "num_moe_experts" in fields:
        if chosen.get("moe_aux_loss_coeff") and fields["moe_router_load_balancing_type"] == "none":
            # The model was trained without a loss, but a coefficient asks for one.
            fields["moe_router_load_balancing_type"] = "aux_loss"
        fields |= chosen | {"moe_router_force_hot_rank": policy.megatron_cfg.moe_router_force_hot_rank}
        if policy.freeze.language_model or policy.lora is not None or policy.megatron_cfg.freeze_moe_router:
            # The bias is not a parameter: Megatron-Core would move it by counts of tokens, even if routers are frozen.
            fields[BIAS_RATE] = 0.0
        problems += _problems_with_experts(fields, grouped_kernels=use_transformer_engine(policy))
        if "moe_router_group_topk" in family.router_fields:
            problems += _problems_with_groups(fields)
    else:
        problems += _problems_without_experts(policy)
    if problems:
        raise ConfigurationError(problems)
    added = {
        name: fields.pop(name) for name in FORCED_ROUTING_FIELDS if name in fields.keys() - transformer_config_fields()
    }
    if fields.get("moe_z_loss_coeff") == 0:
        # The router divides the recorded loss by its coefficient, so only None turns the loss off.
        fields["moe_z_loss_coeff"] = None
    try:
        config = (MLATransformerConfig if fields.get("multi_latent_attention") else TransformerConfig)(**fields)
    except (AssertionError, ValueError, NotImplementedError) as error:
        raise ConfigurationError(f"policy.megatron_cfg: Megatron-Core refuses this configuration: {error}") from error
    for name, value in added.items():
        setattr(config, name, value)
    num_deep = family.vision.deep_layers(hf_config) if family.vision is not None else 0
    if problem := _problem_with_deep_layers(config, num_deep):
        raise ConfigurationError(problem)
    return config


def _problems_with_overrides(overrides: Mapping[str, Any], fields: Mapping[str, Any]) -> list[str]:
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


def _problem_with_deep_layers(config: TransformerConfig, num_deep: int) -> str | None:
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
    found, first = _transformer_engine_version(), FIRST_ENGINE_WITH_PACKED_SINKS
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
    if any(fields.get("linear_attention_freq") or ()):
        problems.append(
            f"{_KEY}context_parallel_size: got {ranks}, expected 1: ranks cannot share sequences of a model with gated"
            " delta nets, whose state passes from token to token"
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
    if any(fields.get("linear_attention_freq") or ()):
        sizes["linear key heads"] = fields["linear_num_key_heads"]
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


def _problems_with_experts(fields: dict[str, Any], *, grouped_kernels: bool) -> list[str]:
    """Return the problems of experts that do not divide evenly, are too few, or lack kernels."""
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
    return problems + _problems_with_dispatcher(fields, on_gpus=not cpu_backend.ACTIVE)


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


def _problems_without_experts(policy: PolicyConfig) -> list[str]:
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


def effective_moe_configuration(config: TransformerConfig) -> dict[str, Any]:
    """Return all router and expert settings in force, or an empty dictionary for a model without experts."""
    if config.num_moe_experts is None:
        return {}
    names = [
        name for name in sorted(transformer_config_fields()) if name.startswith("moe_") or name == "num_moe_experts"
    ]
    in_force = {name: _printable(getattr(config, name)) for name in names}
    return in_force | forced_routing_in_force(config)


def _printable(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_printable(entry) for entry in value]
    return value if isinstance(value, bool | int | float | str | None) else str(value)
