# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Differences between the supported releases of Megatron-Core, and workarounds for their bugs."""

import dataclasses
import functools
import importlib.metadata
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from nemo_rl_moe.routing.routers import token_copies

MEGATRON_VERSION: str = importlib.metadata.version("megatron-core")
HAS_MOE_METRICS_TRACKER: bool = tuple(int(part) for part in MEGATRON_VERSION.split(".")[:2]) >= (0, 17)

ADAM_COPIES_MOMENTS: bool = not HAS_MOE_METRICS_TRACKER
"""Whether Adam of the Transformer Engine that goes with the release (constraints-gpu.txt) updates float32 copies of
moments in bfloat16. Transformer Engine 2.17.1 updates the moments themselves."""


def recorded_auxiliary_losses() -> dict[str, Tensor]:
    """Return name -> loss that routers have recorded since the last clear, with a value for each decoder layer."""
    if HAS_MOE_METRICS_TRACKER:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

        return {name: entry.values for name, entry in get_moe_metrics_tracker().metrics.items()}
    from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

    return {name: entry["values"] for name, entry in get_moe_layer_wise_logging_tracker().items()}


def clear_auxiliary_losses() -> None:
    """Reset the recorded auxiliary losses of this rank to zero."""
    # 0.19's old functions return copies, so the sums are cleared in place.
    for values in recorded_auxiliary_losses().values():
        values.zero_()


def record_auxiliary_loss(name: str, value: Tensor, layer_number: int, config: TransformerConfig) -> None:
    """Add a value to the recorded loss of a layer (counted from 1), as a router does."""
    if HAS_MOE_METRICS_TRACKER:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

        get_moe_metrics_tracker().record(name, value, layer_number, config.num_layers)
    else:
        from megatron.core.transformer.moe.moe_utils import save_to_aux_losses_tracker

        save_to_aux_losses_tracker(name, value, layer_number, config.num_layers)


@functools.cache
def transformer_config_fields() -> frozenset[str]:
    return frozenset(field.name for field in dataclasses.fields(TransformerConfig))


def is_routed_expert(parameter_name: str) -> bool:
    """Return whether a parameter belongs to a routed expert, not to a shared expert."""
    return ".mlp.experts." in f".{parameter_name}"


def mark_expert_parameters(model: nn.Module) -> None:
    """Put every routed expert's gradient into the expert buffers, in every layout.

    Megatron chooses the buffers by `allreduce`, which it sets only with expert parallelism. With tensor parallel 2,
    expert parallel 1 and expert-tensor parallel 1, it then never reduces the expert gradients (up to 0.18). With the
    mark in every layout, an optimizer checkpoint can also move between expert-parallel sizes.

    The function also corrects the bias of an expert's second product, which Megatron marks like that of a
    tensor-parallel layer. Under sequence parallelism, Megatron would sum the ranks' gradients of this bias, even of
    different experts (0.16.1 to 0.19.2), and count only the first rank's in the gradient norm (0.16.1).
    """
    for name, parameter in model.named_parameters():
        if is_routed_expert(name):
            parameter.allreduce = False  # type: ignore[attr-defined]
            parameter.sequence_parallel = False  # type: ignore[attr-defined]
            if not getattr(parameter, "tensor_model_parallel", False):
                parameter.tensor_model_parallel = True  # type: ignore[attr-defined]


def mark_duplicated_weights(model: nn.Module) -> None:
    """Unmark weights of Transformer Engine's linear layers that every tensor-parallel rank holds in full.

    Transformer Engine marks all weights of its linear layers as split, even duplicated ones such as the
    down-projections of latent attention. Import and export would take a full weight for a part, and the gradient norm
    would count it once per rank.
    """
    for name, module in model.named_modules():
        is_duplicated = hasattr(module, "parallel_mode") and module.parallel_mode is None
        if is_duplicated and not is_routed_expert(f"{name}."):
            for parameter in module.parameters(recurse=False):
                parameter.tensor_model_parallel = False


def mark_attention_sinks(model: nn.Module) -> None:
    """Mark attention sinks, one number for each head, as split along the heads by tensor parallelism.

    Megatron splits the sinks without a mark. They would count as replicas, and the gradient norm would include only the
    sinks of the first rank (0.16.1 to 0.19.2).
    """
    for name, parameter in model.named_parameters():
        if name.endswith("core_attention.softmax_offset"):
            set_tensor_model_parallel_attributes(parameter, True, 0, 1)


def _count_tokens_for_expert_bias(self: Any, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
    """Replace TopKRouter._apply_expert_bias, whose mask lacks the expert dimension and cannot be broadcast."""
    if self.enable_expert_bias and torch.is_grad_enabled():
        with torch.no_grad():
            if (copies := token_copies(self)) is not None:
                routing_map = routing_map[copies]
            elif padding_mask is not None:
                routing_map = routing_map & ~padding_mask.reshape(-1, 1)
            self.local_tokens_per_expert += routing_map.sum(dim=0)


def correct_expert_bias_with_padding() -> None:
    """Make an expert bias work with a padding mask (0.16.1 to 0.19.2 raise an error)."""
    TopKRouter._apply_expert_bias = _count_tokens_for_expert_bias


def padding_mask_for_stage(
    padding_mask: Tensor | None, *, is_first_stage: bool, tensor_rank: int, tensor_size: int
) -> Tensor | None:
    """Return the padding mask `[batch, sequence]` for this stage: in full on the first stage, else the rank's block.

    Megatron splits the mask for sequence parallelism in the embedding. Later stages would fail with the full mask.
    """
    if padding_mask is None or is_first_stage or tensor_size == 1:
        return padding_mask
    return padding_mask.chunk(tensor_size, dim=1)[tensor_rank].contiguous()
