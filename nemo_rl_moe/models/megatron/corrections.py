# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Places where Megatron-Core is wrong without an error, or fails on a combination that users need, and their cures.

Each is pinned by a test that fails without it. Settings that cure (communication flags, say) stand in
`transformer_config.py` with their reason.
"""

from typing import Any

import torch
from torch import Tensor, nn

from nemo_rl_moe.models.megatron import cpu_backend  # noqa: F401  (before megatron.core)

# isort: split
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig


def is_routed_expert(parameter_name: str) -> bool:
    """True for the weights of routed experts, False for shared experts and everything else."""
    return ".mlp.experts." in f".{parameter_name}"


def mark_expert_parameters(model: nn.Module) -> None:
    """Puts every routed expert's gradient in the expert buffers, whatever the layout.

    Megatron decides by `allreduce`, which it sets only where expert parallelism is on. With tensor parallel 2, expert
    parallel 1 and expert-tensor parallel 1 the expert gradients are then never reduced (up to 0.18). Marking them
    always also lets an optimizer checkpoint move between expert-parallel sizes.

    The bias of an expert's second product it takes for one of a layer that is cut among tensor-parallel ranks: under
    sequence parallelism it adds up these ranks' gradients, of different experts even (0.16.1 to 0.19.2), and only the
    first rank counts them in the gradient norm (0.16.1).
    """
    for name, parameter in model.named_parameters():
        if is_routed_expert(name):
            parameter.allreduce = False  # type: ignore[attr-defined]
            parameter.sequence_parallel = False  # type: ignore[attr-defined]
            if not getattr(parameter, "tensor_model_parallel", False):
                parameter.tensor_model_parallel = True  # type: ignore[attr-defined]


def mark_attention_sinks(model: nn.Module) -> None:
    """Says of the sinks of attention, a number for each head, that tensor-parallel ranks hold those of their heads.

    Megatron cuts them and does not say so: they would be taken for copies, and only the first rank's count in the
    gradient norm (0.16.1 to 0.19.2).
    """
    for name, parameter in model.named_parameters():
        if name.endswith("core_attention.softmax_offset"):
            set_tensor_model_parallel_attributes(parameter, True, 0, 1)


def _count_tokens_for_expert_bias(self: Any, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
    """TopKRouter._apply_expert_bias, whose mask lacks the expert dimension and cannot be broadcast."""
    if self.enable_expert_bias and torch.is_grad_enabled():
        with torch.no_grad():
            if padding_mask is not None:
                routing_map = routing_map & ~padding_mask.reshape(-1, 1)
            self.local_tokens_per_expert += routing_map.sum(dim=0)


def correct_expert_bias_with_padding() -> None:
    """Makes an expert bias work together with a padding mask (0.16.1 to 0.19.2 raise an error)."""
    TopKRouter._apply_expert_bias = _count_tokens_for_expert_bias


def needs_padding_mask(config: TransformerConfig) -> bool:
    """Whether a microbatch needs a padding mask though it has no padding.

    Without a mask the router takes its own number of tokens times the number of ranks for that of all ranks. The
    global-batch loss spans the data-parallel ranks, whose microbatches differ in size.
    """
    types = config.moe_router_load_balancing_type
    return "global_aux_loss" in ([types] if isinstance(types, str) else types)


def padding_mask_for_stage(
    padding_mask: Tensor | None, *, is_first_stage: bool, tensor_rank: int, tensor_size: int
) -> Tensor | None:
    """The padding mask as this pipeline stage needs it.

    Megatron cuts the mask for sequence parallelism in the embedding: later stages get it whole, and fail on its shape.

    Args:
        padding_mask: [batch, sequence], True on padding.
        is_first_stage: Whether this model chunk holds the embedding.
        tensor_rank: Rank in the sequence-parallel (tensor-parallel) group.
        tensor_size: Size of that group.

    Returns:
        The whole mask on the first stage, this rank's block of the sequence on the others.
    """
    if padding_mask is None or is_first_stage or tensor_size == 1:
        return padding_mask
    return padding_mask.chunk(tensor_size, dim=1)[tensor_rank].contiguous()
