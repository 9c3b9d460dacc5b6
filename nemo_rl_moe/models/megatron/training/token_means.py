# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Means over the tokens of a step's training forward passes, in each MoE layer."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from jaxtyping import Float
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_rl_moe.distributed.batch import GlobalBatchShard
from nemo_rl_moe.models.megatron.training.router_hooks import cut_of_rank
from nemo_rl_moe.models.megatron.training.step_observer import StepObservations, StepObserver, TrainingForward
from nemo_rl_moe.routing.routers import moe_layer_indices


class TokenMeans(StepObserver):
    """Mean of a quantity over the tokens of each MoE layer, without padding and recomputed passes.

    A subclass sets `metric`, the prefix of the keys, and calls `add` from its hooks while `is_open`.
    """

    metric: str

    def __init__(self, config: TransformerConfig, device: torch.device, *, per_layer: bool):
        self._config, self._per_layer = config, per_layer
        self.layers = moe_layer_indices(config)
        # For each layer, the sum of the quantity and the number of tokens.
        self._sums = torch.zeros(len(self.layers), 2, dtype=torch.float64, device=device)
        self._is_real: Tensor | None = None
        self._copies: Tensor | None = None
        self.is_open = False

    def start_step(self, number: int, shards: Sequence[GlobalBatchShard]) -> None:
        self._sums.zero_()

    @contextmanager
    def training_forward(self, forward: TrainingForward) -> Iterator[None]:
        padding = forward.microbatch.padding_mask
        cut, shared = cut_of_rank(self._config), forward.microbatch.shared
        self._is_real = None if padding is None else forward.microbatch.in_router_order(~padding, cut)
        self._copies = None if shared is None else shared.copies_of(cut).source
        self.is_open = True
        try:
            yield
        finally:
            self.is_open = False

    def add(self, row: int, values: Float[Tensor, " tokens"], *, of_copies: bool = False) -> None:
        """Add the values of the tokens of one forward pass of a layer, in the routers' order.

        Args:
            of_copies: Whether a token that sequences share has a value for each of them already.
        """
        values = values.double() if of_copies or self._copies is None else values.double()[self._copies]
        is_real = torch.ones_like(values) if self._is_real is None else self._is_real.to(values.dtype)
        self._sums[row] += torch.stack([values @ is_real, is_real.sum()])

    def end_step(self) -> StepObservations:
        """Return the mean over all layers and, if asked for, each layer's mean. Every rank calls it."""
        # Stages have different layers. Tensor-parallel ranks have the same tokens, which does not change the mean, or
        # different parts of them.
        dist.all_reduce(self._sums)
        means = (self._sums[:, 0] / self._sums[:, 1].clamp_min(1)).tolist()
        metrics = {f"{self.metric}/mean": sum(means) / len(means)}
        if self._per_layer:
            named = zip(self.layers, means, strict=True)
            metrics |= {f"{self.metric}/mean_layer_{layer}": mean for layer, mean in named}
        return StepObservations(metrics)
