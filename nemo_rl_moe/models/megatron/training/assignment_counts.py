# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Counts of tokens by row, layer and expert in training forward passes. A row is a sequence or a kind of token."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Int
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from nemo_rl_moe.routing.metrics.routing_advantage import add_sequence_assignments
from nemo_rl_moe.routing.routers import RouterLayer, moe_layer_indices, routed_experts, routers_of


class AssignmentCounts:
    """Counts `n[r,i,e]` of this rank: number of tokens of row `r` that layer `i` sends to expert `e`.

    A row is a group of tokens, such as a sequence. The last row has the tokens that do not count. Only the decoder's
    routers are counted, without multi-token prediction.

    Attributes:
        layers: Indices of the MoE layers on all pipeline stages.
    """

    def __init__(self, chunks: Sequence[GPTModel], config: TransformerConfig, device: torch.device):
        self._config, self._device = config, device
        self.layers = moe_layer_indices(config)
        self.counts = self._new_counts(0)
        self._rows: Int[Tensor, " tokens"] | None = None
        self._indices: dict[int, Tensor] = {}
        self._own_layers: dict[tuple[int, ...], Tensor] = {}
        positions = {layer: position for position, layer in enumerate(self.layers)}
        for chunk in chunks:
            for layer, router in routers_of(chunk.decoder):
                assert isinstance(layer.key, int)  # Megatron-Core numbers its layers
                hook = self._hook(positions[layer.key], layer)
                router.register_forward_hook(hook)

    @property
    def other_row(self) -> int:
        """Index of the last row, for tokens that do not count."""
        return len(self.counts) - 1

    @property
    def own_counts(self) -> Int[Tensor, "rows layers experts"]:
        """Counts without the last row, for a sum over all ranks: 0 if another rank counts the same tokens."""
        tensor_rank = parallel_state.get_tensor_model_parallel_rank()
        counts = self.counts[:-1]
        return counts if self._config.sequence_parallel or tensor_rank == 0 else torch.zeros_like(counts)

    def start(self, num_rows: int) -> None:
        """Clear the counts, and resize them to `num_rows` rows, plus one for the tokens that do not count."""
        if len(self.counts) == num_rows + 1:
            self.counts.zero_()
        else:
            self.counts = self._new_counts(num_rows)

    @contextmanager
    def counting(self, rows: Int[Tensor, " tokens"]) -> Iterator[None]:
        """Count the experts that the routers choose while the context is open.

        Args:
            rows: Index of each token's row, in the order in which the routers see the tokens.
        """
        self._rows = rows
        try:
            yield
            self._add_indices(rows)
        finally:
            self._rows = None
            self._indices = {}

    def _new_counts(self, num_rows: int) -> Int[Tensor, "rows layers experts"]:
        shape = (num_rows + 1, len(self.layers), int(self._config.num_moe_experts or 0))
        return torch.zeros(shape, dtype=torch.int32, device=self._device)

    def _add_indices(self, rows: Int[Tensor, " tokens"]) -> None:
        """Add the counts of all layers at once, because kernel launches dominate on small models."""
        positions = tuple(self._indices)
        if not positions:
            return
        if positions not in self._own_layers:
            self._own_layers[positions] = torch.tensor(positions, device=self._device)[:, None, None]
        of_layers = torch.stack(list(self._indices.values()))
        add_sequence_assignments(self.counts, self._own_layers[positions], of_layers, rows)

    def _hook(self, position: int, layer: RouterLayer) -> Any:
        def count(router: nn.Module, args: Any, outputs: Any) -> None:
            if self._rows is None:
                return
            routed = routed_experts(layer, router, outputs)
            if routed.dtype == torch.bool:
                add_sequence_assignments(self.counts, position, routed, self._rows)
            else:  # a router runs once in a forward pass
                self._indices[position] = routed

        return count
