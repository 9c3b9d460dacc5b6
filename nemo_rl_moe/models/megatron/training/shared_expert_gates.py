# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Mean gate of the shared experts over the tokens of a step's training forward passes."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from nemo_rl_moe.distributed.batch import GlobalBatchShard
from nemo_rl_moe.models.megatron.model.transformer_config import moe_layer_indices
from nemo_rl_moe.models.megatron.training.router_hooks import cut_of_rank
from nemo_rl_moe.models.megatron.training.step_observer import StepObservations, StepObserver, TrainingForward

METRIC = "shared_expert_gate"


class SharedExpertGates(StepObserver):
    """Mean of `sigmoid(gate_weight . hidden_states)` in each layer, the gate of the layer's shared experts for a token.

    Routers do not choose shared experts, but the share of shared experts in a layer's output can drift.
    """

    def __init__(self, chunks: Sequence[GPTModel], config: TransformerConfig, device: torch.device, *, per_layer: bool):
        self._config, self._per_layer = config, per_layer
        self._layers = moe_layer_indices(config)
        # For each layer, the sum of gates and the number of tokens.
        self._sums = torch.zeros(len(self._layers), 2, dtype=torch.float64, device=device)
        self._is_real: Tensor | None = None
        self._copies: Tensor | None = None
        self._is_open = False
        for chunk in chunks:
            for layer in chunk.decoder.layers:
                if isinstance(layer.mlp, MoELayer):
                    row = self._layers.index(layer.layer_number - 1)
                    layer.mlp.register_forward_pre_hook(partial(self._measure, row), with_kwargs=True)

    def start_step(self, number: int, shards: Sequence[GlobalBatchShard]) -> None:
        self._sums.zero_()

    @contextmanager
    def training_forward(self, forward: TrainingForward) -> Iterator[None]:
        padding = forward.microbatch.padding_mask
        cut, shared = cut_of_rank(self._config), forward.microbatch.shared
        self._is_real = None if padding is None else forward.microbatch.in_router_order(~padding, cut)
        self._copies = None if shared is None else shared.copies_of(cut).source
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False

    @torch.no_grad()
    def _measure(self, row: int, layer: nn.Module, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        if not self._is_open:
            return
        inputs = arguments[0] if arguments else keywords["hidden_states"]
        experts: Any = layer.shared_experts
        gates = F.linear(inputs.flatten(0, -2), experts.gate_weight).sigmoid().double().squeeze(-1)
        gates = gates if self._copies is None else gates[self._copies]
        is_real = torch.ones_like(gates) if self._is_real is None else self._is_real.to(gates.dtype)
        self._sums[row] += torch.stack([gates @ is_real, is_real.sum()])

    def end_step(self) -> StepObservations:
        """Return the mean over all layers and, if asked for, each layer's mean. Every rank calls it."""
        # Stages have different layers. Tensor-parallel ranks have the same tokens, which does not change the mean, or
        # different parts of them.
        dist.all_reduce(self._sums)
        means = (self._sums[:, 0] / self._sums[:, 1].clamp_min(1)).tolist()
        metrics = {f"{METRIC}/mean": sum(means) / len(means)}
        if self._per_layer:
            metrics |= {f"{METRIC}/mean_layer_{layer}": mean for layer, mean in zip(self._layers, means, strict=True)}
        return StepObservations(metrics)
