# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Forward hooks on Megatron-Core's routers that feed the expert-load recorder."""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from nemo_rl_moe.routing.metrics.expert_load_recorder import ExpertLoadRecorder
from nemo_rl_moe.routing.routers import (
    RouterLayer,
    mask_of_call,
    moe_layer_indices,
    routed_experts,
    routers_of,
    token_copies,
)


def attach_expert_load_recorder(
    chunks: Sequence[GPTModel], config: TransformerConfig, device: torch.device
) -> ExpertLoadRecorder | None:
    """Return a recorder that sees every call of the decoder's routers, or None for a model without MoE layers."""
    positions = {layer: position for position, layer in enumerate(moe_layer_indices(config))}
    if not positions:
        return None
    recorder = ExpertLoadRecorder(len(positions), config.num_moe_experts, device)
    for chunk in chunks:
        for layer, router in routers_of(chunk.decoder):
            assert isinstance(layer.key, int)  # Megatron-Core numbers its layers
            router.register_forward_hook(_recording_hook(recorder, positions[layer.key], layer), with_kwargs=True)
    return recorder


def _recording_hook(recorder: ExpertLoadRecorder, position: int, layer: RouterLayer) -> Any:
    def record(router: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
        if recorder.is_recording:
            padding = mask_of_call(args, kwargs) if token_copies(router) is None else None
            recorder.add(position, routed_experts(layer, router, outputs), padding)

    return record
