# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""`policy.megatron_cfg.model_overrides`: fields of Megatron-Core's TransformerConfig that have no key of their own.

Only fields that change how a model is computed are allowed. A field that changes the result must be in config.json: it
is exported with the weights, and an engine reads nothing else.
"""

from collections.abc import Collection, Iterator, Mapping
from enum import Enum
from typing import Any, get_args, get_type_hints

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from pydantic import ConfigDict, TypeAdapter, ValidationError

from nemo_rl_moe.config.schema_policy import MegatronConfig
from nemo_rl_moe.config.suggestions import did_you_mean, nearest
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.megatron.model.releases import MEGATRON_VERSION, transformer_config_fields

KEY = "policy.megatron_cfg.model_overrides"
COMPUTING_FIELDS = frozenset(
    {
        # Kernels, and the precision of steps inside of them.
        "attention_backend",
        "attention_softmax_in_fp32",
        "batch_invariant_mode",
        "bias_activation_fusion",
        "bias_dropout_fusion",
        "apply_rope_fusion",
        "fused_single_qkv_rope",
        "cross_entropy_fusion_impl",
        "cross_entropy_loss_fusion",
        "deterministic_mode",
        "disable_bf16_reduced_precision_matmul",
        "flash_attention_version",
        "fused_residual_rmsnorm",
        "gradient_accumulation_fusion",
        "masked_softmax_fusion",
        "persist_layer_norm",
        "memory_efficient_layer_norm",
        # Communication.
        "async_tensor_model_parallel_allreduce",
        "barrier_with_L1_time",
        "batch_p2p_comm",
        "batch_p2p_sync",
        "cp_comm_type",
        "high_priority_a2a_comm_stream",
        "microbatch_group_size_per_vp_stage",
        "overlap_p2p_comm",
        "overlap_p2p_comm_warmup_flush",
        "pipeline_model_parallel_comm_backend",
        "use_ring_exchange_p2p",
        # Memory.
        "clone_scatter_output_in_embedding",
        "cpu_offloading",
        "cpu_offloading_activations",
        "cpu_offloading_double_buffering",
        "cpu_offloading_num_layers",
        "cpu_offloading_retain_pinned_cpu_buffers",
        "cpu_offloading_weights",
        "deallocate_pipeline_outputs",
        "distribute_saved_activations",
        "activation_offload_fraction",
        "delta_offload_bytes_across_pp_ranks",
        "fine_grained_activation_offloading",
        "fine_grained_offloading_max_inflight_offloads",
        "min_offloaded_tensor_size",
        "offload_modules",
    }
)
"""Fields of Megatron-Core 0.16.1 and 0.19.2 that only change how a model is computed."""
_MODEL = (
    "is not one of the fields that only change how a model is computed: the trained model could differ from the"
    " exported config.json"
)
_NEED_MORE = {
    "tp_comm_": "needs buffers of Transformer Engine that this program does not make",
    "overlap_moe_expert_parallel_comm": "needs a schedule of forward and backward passes that this program lacks",
    "ep_overlap_early_attn_memory_release": "belongs to overlap_moe_expert_parallel_comm, which is not supported",
    "overlap_dispatch_backward_with_experts_wgrad": "is not supported: it defers gradients of weights",
    "delay_wgrad_compute": "belongs to overlap_moe_expert_parallel_comm, which is not supported",
    "defer_embedding_wgrad_compute": "needs Megatron-Core's output layer, which training replaces to save memory",
    "wgrad_deferral_limit": "belongs to defer_embedding_wgrad_compute, which is not supported",
    "mtp_": "is not supported: layers of multi-token prediction have the form of the model's files",
    "fp32_residual_connection": "is not supported: activations between layers have the type of policy.precision",
    "inference_": "belongs to Megatron-Core's own engine, which does not generate here",
    "flash_decode": "belongs to Megatron-Core's own engine, which does not generate here",
    "init_": "has no effect: weights are set by this program, the same in every layout",
    "embedding_init_": "has no effect: weights are set by this program, the same in every layout",
    "perform_initialization": "has no effect: weights are set by this program, the same in every layout",
    "use_cpu_initialization": "has no effect: weights are set by this program, the same in every layout",
    "cuda_graph_": "belongs to CUDA graphs, which are not supported",
    "variable_seq_lengths": "is not supported: microbatches of a pipeline are padded to one length",
    "account_for_": "is not supported: layers are divided by policy.megatron_cfg.num_layers_in_first_pipeline_stage"
    " and _last_",
    "quant_recipe": "is not supported: weights are exported in 16 bits",
    "use_kitchen": "is not supported: weights are exported in 16 bits",
}
"""Beginning of a field's name -> why the field cannot be set, although it changes no result."""
_KEYS = {
    "enable_autocast": "policy.precision",
    "autocast_dtype": "policy.precision",
    "recompute_modules": "policy.megatron_cfg.activation_checkpointing",
    "num_microbatches_with_partial_activation_checkpoints": "policy.megatron_cfg.activation_checkpointing",
    "moe_extended_tp": "policy.megatron_cfg.expert_tensor_parallel_size",
    "transformer_impl": "cluster.gpus_per_node",
    "params_dtype": "policy.precision",
    "pipeline_dtype": "policy.precision",
    "bf16": "policy.precision",
    "fp16": "policy.precision",
    "recompute_granularity": "policy.megatron_cfg.activation_checkpointing",
    "recompute_method": "policy.megatron_cfg.activation_checkpointing",
    "recompute_num_layers": "policy.megatron_cfg.activation_checkpointing",
    "calculate_per_token_loss": "loss_fn, which sets the weight of each token",
    "pipeline_model_parallel_layout": "policy.megatron_cfg.num_layers_in_first_pipeline_stage and _last_",
}
"""Field of TransformerConfig -> key of this project's configuration that sets it under another name."""
_CUDA_GRAPHS = ("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph")
_NARROW_FORMATS = ("fp8", "fp4")
_PAGE = "docs/sft.md#fields-without-a-key"
_ADAPTER = ConfigDict(strict=True, arbitrary_types_allowed=True)


def read_overrides(values: Mapping[str, Any], of_the_model: Collection[str]) -> dict[str, Any]:
    """Return the fields, checked and converted for the TransformerConfig: a name becomes a member of its enumeration.

    Args:
        of_the_model: Names of the fields that the model's config.json determines.
    """
    if not values:
        return {}
    hints = get_type_hints(TransformerConfig)
    found, problems = dict[str, Any](), list[str]()
    for name, value in values.items():
        if problem := next(_problems_with_name(name, of_the_model, hints), None):
            problems.append(f"{KEY}.{name}: {problem}")
            continue
        try:
            found[name] = _read(value, hints[name])
        except (ValueError, ValidationError) as error:
            reported = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
            problems.append(f"{KEY}.{name}: got {value!r}: {reported}")
    if problems:
        raise ConfigurationError(problems)
    return found


def _problems_with_name(name: str, of_the_model: Collection[str], hints: Mapping[str, Any]) -> Iterator[str]:
    if name in MegatronConfig.model_fields:
        yield f"has a key of its own: policy.megatron_cfg.{name}"
    if name in _KEYS:
        yield f"follows from {_KEYS[name]}"
    if name in _CUDA_GRAPHS:
        yield "is not supported: CUDA graphs run no hooks, so loads would be 0 and no route replayed, without an error"
    if name.startswith(_NARROW_FORMATS):
        yield "is not supported: packed sequences are no multiples of 16 tokens, and weights are exported in 16 bits"
    fields = transformer_config_fields()
    if name not in fields:
        hint = did_you_mean(nearest(name, sorted(COMPUTING_FIELDS & fields)))
        yield f"megatron-core {MEGATRON_VERSION} has no such field of TransformerConfig{hint}"
    if name in of_the_model:
        yield "comes from the model's config.json"
    if name not in hints:
        return
    if not _fits_in_yaml(hints[name]):
        yield "cannot be set: YAML has no values of its type"
    yield from (reason for beginning, reason in _NEED_MORE.items() if name.startswith(beginning))
    if name not in COMPUTING_FIELDS:
        yield f"{_MODEL}{did_you_mean(nearest(name, sorted(COMPUTING_FIELDS & fields)))} ({_PAGE})"


def _fits_in_yaml(hint: Any) -> bool:
    """Return whether YAML can express values of a type. It cannot express functions and torch's types."""
    kinds = [kind for kind in get_args(hint) if kind is not type(None)] or [hint]
    return not any(
        kind is torch.dtype or (not isinstance(kind, type) and "Callable" in str(kind)) or "ContextManager" in str(kind)
        for kind in kinds
    )


def _read(value: Any, hint: Any) -> Any:
    if isinstance(hint, type) and issubclass(hint, Enum):
        members = {member.name: member for member in hint}
        if value not in members:
            raise ValueError(f"expected one of {', '.join(members)}")
        return members[value]
    return TypeAdapter(hint, config=_ADAPTER).validate_python(value)
