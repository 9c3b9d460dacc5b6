# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Mean gate of the shared experts over the tokens of a step's training forward passes."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from nemo_rl_moe.models.megatron.training.token_means import TokenMeans


class SharedExpertGates(TokenMeans):
    """Mean of `sigmoid(gate_weight . hidden_states)` in each layer, the gate of the layer's shared experts for a token.

    Routers do not choose shared experts, but the share of shared experts in a layer's output can drift.
    """

    metric = "shared_expert_gate"

    def __init__(self, chunks: Sequence[GPTModel], config: TransformerConfig, device: torch.device, *, per_layer: bool):
        super().__init__(config, device, per_layer=per_layer)
        for chunk in chunks:
            for layer in chunk.decoder.layers:
                if isinstance(layer.mlp, MoELayer):
                    row = self.layers.index(layer.layer_number - 1)
                    layer.mlp.register_forward_pre_hook(partial(self._measure, row), with_kwargs=True)

    @torch.no_grad()
    def _measure(self, row: int, layer: nn.Module, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        if not self.is_open:
            return
        inputs = arguments[0] if arguments else keywords["hidden_states"]
        experts: Any = layer.shared_experts
        self.add(row, F.linear(inputs.flatten(0, -2), experts.gate_weight).sigmoid().double().squeeze(-1))
