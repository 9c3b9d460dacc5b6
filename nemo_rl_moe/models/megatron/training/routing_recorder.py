# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Attaches the expert-load recorder to Megatron-Core's routers."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nemo_rl_moe.models.megatron.model.transformer_config import moe_layer_indices
from nemo_rl_moe.moe.recorder import ExpertLoadRecorder

# isort: split
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig


def attach_recorder(
    chunks: Sequence[GPTModel], config: TransformerConfig, device: torch.device
) -> ExpertLoadRecorder | None:
    """Makes a recorder that hears of every router call; None for a model without MoE layers."""
    positions = {layer: position for position, layer in enumerate(moe_layer_indices(config))}
    if not positions:
        return None
    recorder = ExpertLoadRecorder(len(positions), config.num_moe_experts, device)
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, TopKRouter):
                # Megatron's layer numbers are global and count from 1.
                hook = _counting_hook(recorder, positions[module.layer_number - 1], config)
                module.register_forward_hook(hook, with_kwargs=True)
    return recorder


def _counting_hook(recorder: ExpertLoadRecorder, position: int, config: TransformerConfig) -> Any:
    padded_to_capacity = bool(config.moe_pad_expert_input_to_capacity)

    def count(router: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: tuple[Tensor, Tensor]) -> None:
        probabilities, chosen = output
        mask = kwargs.get("padding_mask", args[1] if len(args) > 1 else None)
        padding = None if mask is None else mask.reshape(-1)
        if padded_to_capacity and chosen.dtype == torch.bool:
            # The map is filled up to the capacity with tokens that did not choose the expert: their weight is 0.
            chosen = chosen & (probabilities.detach() > 0)
        recorder.add(position, chosen, padding)

    return count
