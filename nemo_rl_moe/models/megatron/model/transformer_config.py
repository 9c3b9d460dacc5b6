# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The effective TransformerConfig, its auxiliary losses and the windows of its attention."""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.activations import squared_relu
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.families import FAMILIES, family_of
from nemo_rl_moe.models.families.linear_targets import target_problems
from nemo_rl_moe.models.layer_kinds import LAYER_PATTERN, Mixer, mixers_of
from nemo_rl_moe.models.megatron.cpu import cpu_backend
from nemo_rl_moe.models.megatron.layers.routers import FORCED_ROUTING_FIELDS, forced_routing_in_force
from nemo_rl_moe.models.megatron.model import transformer_engine
from nemo_rl_moe.models.megatron.model.model_overrides import read_overrides
from nemo_rl_moe.models.megatron.model.releases import MEGATRON_VERSION, transformer_config_fields
from nemo_rl_moe.models.megatron.model.shared_prefix import problems_with_shared_prefix
from nemo_rl_moe.models.megatron.model.sparse_attention import problems_with_choices
from nemo_rl_moe.models.megatron.model.stages import layers_of_chunks
from nemo_rl_moe.models.megatron.model.transformer_engine import use_transformer_engine
from nemo_rl_moe.models.megatron.model.transformer_problems import (
    BIAS_RATE,
    layout_problems,
    problem_with_deep_layers,
    problems_with_experts,
    problems_with_overrides,
    problems_without_experts,
)

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


def attention_windows(config: TransformerConfig) -> list[int | None]:
    """Return, for each layer with attention, the number of keys that a query sees (also its own), or None for all."""
    size, frequency = config.window_size, config.window_attn_skip_freq
    numbers = [index + 1 for index, mixer in enumerate(mixers_of(config)) if mixer is Mixer.ATTENTION]
    return [size[0] + 1 if is_layer_window_attention(size, frequency, number) else None for number in numbers]


def num_trained_mtp_layers(policy: PolicyConfig, hf_config: Any) -> int:
    """Return the number of layers of multi-token prediction that are trained (`mtp_num_layers`), after a check.

    Raises:
        ConfigurationError: The family's layers cannot be trained, or the model has another number of layers.
    """
    wanted, key = policy.megatron_cfg.mtp_num_layers, f"{_KEY}mtp_num_layers"
    if wanted is None:
        return 0
    family = family_of(hf_config)
    if family.mtp_layers is None:
        trainable = sorted({of.name for of in FAMILIES.values() if of.mtp_layers is not None})
        why = (
            "whose layers of multi-token prediction are kept unchanged"
            if family.kept_tensors(hf_config)
            else "which has no layers of multi-token prediction"
        )
        raise ConfigurationError(
            f"{key}: got {wanted}, expected null for {family.name}, {why}; they can be trained in"
            f" {', '.join(trainable)}"
        )
    held = family.mtp_layers.count(hf_config)
    if wanted != held or held > 1:
        allowed = "1 or null" if held == 1 else "null"
        raise ConfigurationError(
            f"{key}: got {wanted}, expected {allowed}: the model's config.json declares {held} layers of multi-token"
            " prediction, and one can be trained"
        )
    return wanted


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": torch.nn.functional.silu,
    "quick_gelu": quick_gelu,
    "relu2": squared_relu,
}
"""Activation functions by the names that model families use."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

_RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}


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
        "moe_permute_fusion": fused and transformer_engine.release() >= (2, 1),
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
    if fields["activation_func"] is squared_relu:
        # Megatron-Core has no such fusion for squared ReLU.
        fields["bias_activation_fusion"] = False
    if fields["add_bias_linear"]:
        # Transformer Engine's experts refuse this fusion if they have biases.
        fields["bias_dropout_fusion"] = False
    fields |= _RECOMPUTE[policy.megatron_cfg.activation_checkpointing]
    overrides = read_overrides(policy.megatron_cfg.model_overrides, of_the_model)
    problems = problems_with_overrides(overrides, fields)
    fields |= overrides
    chosen = policy.megatron_cfg.moe_transformer_fields
    problems += [
        f"{_KEY}{name}: megatron-core {MEGATRON_VERSION} has no such field"
        for name in chosen
        if name not in transformer_config_fields() and name not in FORCED_ROUTING_FIELDS
    ]
    problems += layout_problems(policy, fields, has_vision=family.vision is not None)
    problems += problems_with_shared_prefix(policy, fields, has_vision=family.vision is not None)
    problems += [] if policy.lora is None else target_problems(policy.lora, hf_config)
    num_trained_mtp_layers(policy, hf_config)  # checks the model
    if "num_moe_experts" in fields:
        if chosen.get("moe_aux_loss_coeff") and fields["moe_router_load_balancing_type"] == "none":
            # The model was trained without a loss, but a coefficient asks for one.
            fields["moe_router_load_balancing_type"] = "aux_loss"
        fields |= chosen | {"moe_router_force_hot_rank": policy.megatron_cfg.moe_router_force_hot_rank}
        if policy.freeze.language_model or policy.lora is not None or policy.megatron_cfg.freeze_moe_router:
            # The bias is not a parameter: Megatron-Core would move it by counts of tokens, even if routers are frozen.
            fields[BIAS_RATE] = 0.0
        problems += problems_with_experts(
            fields,
            grouped_kernels=use_transformer_engine(policy),
            chooses_groups="moe_router_group_topk" in family.router_fields,
        )
    else:
        problems += problems_without_experts(policy)
    if problems:
        raise ConfigurationError(problems)
    own = (*FORCED_ROUTING_FIELDS, LAYER_PATTERN)
    added = {name: fields.pop(name) for name in own if name in fields.keys() - transformer_config_fields()}
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
    if problem := problem_with_deep_layers(config, num_deep):
        raise ConfigurationError(problem)
    stages = [layers_of_chunks(config, stage) for stage in range(config.pipeline_model_parallel_size)]
    if problems := problems_with_choices(policy, hf_config, stages):
        raise ConfigurationError(problems)
    return config


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
