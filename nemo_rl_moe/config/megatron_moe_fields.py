# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The `moe_*` fields of Megatron-Core's `TransformerConfig`, with the same names.

This is a static copy of names and types of the versions 0.16.1 and 0.19.2, so that checking a configuration does not
import Megatron-Core. Fields that only some versions have are marked with these versions. A field that is not set is not
passed to Megatron-Core. `moe_router_force_biased` exists in Megatron-Core from 0.17 on, and this package adds it to
older routers. Not included: `moe_per_layer_logging`, a key of this package, `moe_extended_tp`, which the expert tensor
parallel size replaced, `moe_grad_scale_func`, a function, and numbers of experts, which come from the model.
"""

import re
from typing import Annotated, Any, Literal

from pydantic import Field

from nemo_rl_moe.config.schema_base import (
    Coefficient,
    PositiveCoefficient,
    PositiveInt,
    StrictModel,
    UnitFloat,
    WholeOrLess,
)

LoadBalancingType = Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "quantile_balancing", "none"]

OneOrNone = Annotated[int, Field(ge=0, le=1)]
# Megatron-Core reads a negative factor as no limit.
CapacityFactor = Annotated[float, Field(le=1000)]

# Values that only newer versions accept: field -> value -> first version with it.
VALUE_SINCE: dict[str, dict[str, str]] = {
    "moe_router_load_balancing_type": {"quantile_balancing": "0.19"},
    "moe_router_score_function": {"sqrtsoftplus": "0.19"},
    "moe_flex_dispatcher_backend": {"ncclep": "0.19"},
}


def _unset(since: str | None = None, until: str | None = None) -> Any:
    """Return an optional field. `since` and `until` are the first and the last version of Megatron-Core that has it."""
    return Field(default=None, json_schema_extra={"since": since, "until": until})


class MoeTransformerFields(StrictModel):
    """Fields that may be set in `policy.megatron_cfg`. A field that is not set has the model's or Megatron-Core's
    value."""

    moe_layer_freq: PositiveInt | list[OneOrNone] = _unset()
    """Every this many layers is an MoE layer. A list has 1 for each MoE layer and 0 for each dense layer."""
    moe_ffn_hidden_size: PositiveInt | None = _unset()
    """Hidden size of each routed expert."""
    moe_latent_size: PositiveInt | None = _unset()
    """Size to which tokens are projected before they go to the experts. null: no projection."""
    moe_mlp_glu_interleave_size: PositiveInt | None = _unset(since="0.19")
    """Block size with which gate and linear halves are interleaved in the routed experts."""
    moe_shared_expert_intermediate_size: PositiveInt | None = _unset()
    """Hidden size of all shared experts together. null: no shared experts."""
    moe_shared_expert_gate: bool = _unset()
    """Multiply the shared experts' output by a learnt gate."""
    moe_shared_expert_overlap: bool = _unset()
    """Compute shared experts while tokens travel between ranks."""
    moe_shared_expert_glu_interleave_size: PositiveInt | None = _unset(since="0.19")
    """Block size with which gate and linear halves are interleaved in the shared experts."""

    moe_router_topk: PositiveInt = _unset()
    """Number of experts for each token."""
    moe_router_load_balancing_type: LoadBalancingType | list[LoadBalancingType] = _unset()
    """Load balancing method of the router, or a list of methods. A list needs a coefficient for each method."""
    moe_aux_loss_coeff: Coefficient | list[Coefficient] = _unset()
    """Weight of the load balancing loss, or a list of weights if `moe_router_load_balancing_type` is a list."""
    moe_z_loss_coeff: Coefficient | None = _unset()
    """Weight of the z-loss, which penalises large router logits. null: no such loss."""
    moe_input_jitter_eps: UnitFloat | None = _unset()
    """Relative noise on the router's input. null: none."""
    moe_router_pre_softmax: bool = _unset()
    """Take the softmax over all experts before the top ones are chosen."""
    moe_router_score_function: Literal["softmax", "sigmoid", "sqrtsoftplus"] = _unset()
    """Function from logits to scores."""
    moe_router_topk_scaling_factor: PositiveCoefficient | None = _unset()
    """Factor on the scores of the chosen experts. null: 1."""
    moe_router_dtype: Literal["fp32", "fp64"] | None = _unset()
    """Number format of routing. null: the model's format."""
    moe_router_num_groups: PositiveInt | None = _unset()
    """Number of groups of experts for group-limited routing. null: no groups."""
    moe_router_group_topk: PositiveInt | None = _unset()
    """Number of groups that each token may use. null: no groups."""
    moe_router_topk_limited_devices: PositiveInt | None = _unset()
    """Older setting: number of expert-parallel ranks whose experts a token may use. null: no limit."""
    moe_router_enable_expert_bias: bool = _unset()
    """Balance loads by a bias on each expert's score, without a loss."""
    moe_router_bias_update_rate: WholeOrLess = _unset()
    """Size of the change of each expert's bias in an update."""
    moe_router_quantile_balancing_ema: WholeOrLess = _unset(since="0.19")
    """Share of the old bias that quantile balancing keeps."""
    moe_router_force_load_balancing: bool = _unset()
    """For benchmarks and drills only: replace the router's logits by random ones."""
    moe_router_force_biased: float | None = _unset()
    """For benchmarks and drills only: standard deviation of a random bias on each expert. The bias is the same on all
    ranks, and sampled in each forward pass. With a negative number, its absolute value is the standard deviation, and
    the bias is sampled once for each layer. null: off."""
    moe_router_fusion: bool = _unset()
    """Use Transformer Engine's fused routing kernels."""
    moe_router_padding_for_quantization: bool | None = _unset()
    """Pad each expert's tokens to the multiple that 8-bit and 4-bit kernels need."""
    moe_router_padding_for_fp8: bool | None = _unset()
    """Older name of `moe_router_padding_for_quantization`."""
    moe_enable_routing_replay: bool = _unset()
    """Allow Megatron-Core to record and replay the chosen experts."""

    moe_token_dispatcher_type: Literal["allgather", "alltoall", "flex"] = _unset()
    """Dispatcher of tokens to the experts' ranks."""
    moe_flex_dispatcher_backend: Literal["deepep", "hybridep", "ncclep"] = _unset()
    """Library of the flex dispatcher."""
    moe_flex_dispatcher_num_sms: PositiveInt | None = _unset(since="0.19")
    """Number of streaming multiprocessors that the flex dispatcher uses."""
    moe_enable_deepep: bool = _unset()
    """Older switch for DeepEP."""
    moe_deepep_num_sms: PositiveInt | None = _unset()
    """Number of streaming multiprocessors for DeepEP."""
    moe_hybridep_num_sms: PositiveInt | None = _unset()
    """Number of streaming multiprocessors for HybridEP."""
    moe_hybridep_num_sms_preprocessing: PositiveInt = _unset(since="0.19")
    """Number of streaming multiprocessors for HybridEP's first scan."""
    moe_hybridep_num_blocks_permute: PositiveInt | None = _unset(since="0.19")
    """Number of thread blocks for HybridEP's permutation."""
    moe_hybridep_num_blocks_unpermute: PositiveInt | None = _unset(since="0.19")
    """Number of thread blocks for HybridEP's inverse permutation."""
    moe_hybridep_pad_uneven_dispatch_inputs: bool = _unset(since="0.19")
    """Pad to the longest input of the group before HybridEP sends."""
    moe_permute_fusion_into_hybridep: bool = _unset(since="0.19")
    """Let HybridEP permute while it sends."""
    moe_ncclep_static_shape: bool = _unset(since="0.19")
    """Use fixed buffer sizes with the ncclep backend."""
    moe_ncclep_zero_copy: bool = _unset(since="0.19")
    """Send without a staging copy with the ncclep backend."""

    moe_token_dropping: bool = _unset()
    """Reserved by Megatron-Core for dropping tokens."""
    moe_expert_capacity_factor: CapacityFactor | None = _unset()
    """Maximum number of tokens of an expert, relative to its fair share. null: no limit."""
    moe_expert_rank_capacity_factor: CapacityFactor | None = _unset(since="0.19")
    """Maximum number of tokens of an expert-parallel rank, relative to its fair share. null: no limit."""
    moe_pad_expert_input_to_capacity: bool = _unset()
    """Pad each expert's tokens to its capacity."""
    moe_pad_experts_for_cuda_graph_inference: bool = _unset(since="0.19")
    """Pad each expert's tokens while decoding, so that shapes stay fixed for CUDA graphs."""
    moe_token_drop_policy: Literal["probs", "position"] = _unset()
    """Which tokens an expert above its capacity drops. probs: the least probable. position: the last."""

    moe_grouped_gemm: bool = _unset()
    """Use one kernel for the matrices of all experts of a rank."""
    moe_use_legacy_grouped_gemm: bool = _unset(until="0.16")
    """Use the older grouped kernels."""
    moe_single_grouped_weight: bool = _unset(since="0.19")
    """Keep the experts' weights as one parameter."""
    moe_single_grouped_bias: bool = _unset(since="0.19")
    """Keep the experts' biases as one parameter."""
    moe_permute_fusion: bool = _unset()
    """Use fused kernels to permute tokens."""
    moe_apply_probs_on_input: bool = _unset()
    """Multiply tokens by their probabilities before the expert instead of after it."""
    moe_layer_recompute: bool = _unset()
    """Megatron-Core's older name for `activation_checkpointing: moe`."""
    moe_paged_stash: bool = _unset(since="0.19")
    """Keep the experts' activations for the backward pass in pages of a fixed size."""
    moe_paged_stash_page_size: PositiveInt = _unset(since="0.19")
    """Number of tokens in a page."""
    moe_paged_stash_buffer_size_factor_cuda: float = _unset(since="0.19")
    """Size of the buffer for pages on the GPU, relative to the average need. If negative, relative to the maximum
    need."""
    moe_paged_stash_buffer_size_factor_cpu: Coefficient = _unset(since="0.19")
    """Size of the buffer for pages in main memory, relative to the need. 0: no such buffer."""

    @property
    def moe_transformer_fields(self) -> dict[str, Any]:
        """Field -> value of the fields that the user has set, as arguments of `TransformerConfig`."""
        return {name: getattr(self, name) for name in MOE_FIELD_NAMES if name in self.model_fields_set}


MOE_FIELD_NAMES = tuple(MoeTransformerFields.model_fields)


def _release(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version: (0, 19) for "0.19.2rc1"."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def version_problem(name: str, value: Any, installed: str) -> str | None:
    """Return why the installed Megatron-Core does not support a `moe_*` field, or None if it does."""
    extra = MoeTransformerFields.model_fields[name].json_schema_extra
    since, until = (extra.get("since"), extra.get("until")) if isinstance(extra, dict) else (None, None)
    if isinstance(since, str) and _release(installed) < _release(since):
        return f"needs megatron-core {since} or newer, installed is {installed}"
    if isinstance(until, str) and _release(installed) > _release(until):
        return f"megatron-core has it up to {until}, installed is {installed}"
    for single in value if isinstance(value, list) else [value]:
        first = VALUE_SINCE.get(name, {}).get(single) if isinstance(single, str) else None
        if first is not None and _release(installed) < _release(first):
            return f"{single!r} needs megatron-core {first} or newer, installed is {installed}"
    return None
