# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Adapters of a rank's routed experts, for each kind of experts module."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor, nn

from nemo_rl_moe.models.megatron.cpu.moe import ExpertProducts, GroupedExperts
from nemo_rl_moe.models.megatron.lora.adapter import Adapter
from nemo_rl_moe.models.megatron.lora.grouped_products import grouped_product

FC1, FC2 = "linear_fc1", "linear_fc2"


class AdaptedExperts(GroupedExperts):
    """`GroupedExperts` with an adapter on one or both of its linear layers."""

    adapters: Mapping[str, Adapter]

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """Apply each expert to its rows of `[tokens, hidden]`, which are sorted by local expert."""
        if not any(adapter.switch.is_on for adapter in self.adapters.values()):
            return super().forward(permuted_local_hidden_states, tokens_per_expert, permuted_probs)
        tokens, ends = permuted_local_hidden_states, tokens_per_expert.cumsum(0).to(torch.int32)
        weights_1, weights_2 = self.linear_fc1_weights.transpose(1, 2), self.linear_fc2_weights.transpose(1, 2)
        products = ExpertProducts(ends, tokens, (tokens.size(1), weights_1.size(2), weights_2.size(1)))
        gate_up = self._with_term(FC1, tokens, grouped_product(tokens, weights_1, products), ends)
        gate, up = gate_up.chunk(2, -1)
        scaled = (F.silu(gate) * up * permuted_probs.unsqueeze(-1)).to(tokens.dtype)
        return self._with_term(FC2, scaled, grouped_product(scaled, weights_2, products), ends), None

    def _with_term(self, linear: str, rows: Tensor, output: Tensor, ends: Tensor) -> Tensor:
        return output + self.adapters[linear].of_experts(rows, ends) if linear in self.adapters else output


def attach_to_experts(experts: Any, adapters: dict[str, Adapter]) -> None:
    """Attach adapters (name of a linear layer -> adapter) to a layer's routed experts."""
    experts.adapters = nn.ModuleDict(adapters)
    if isinstance(experts, GroupedExperts):
        experts.__class__ = AdaptedExperts
    elif isinstance(experts, SequentialMLP):
        for name, adapter in adapters.items():
            for index, expert in enumerate(experts.local_experts):
                add_to_output(expert.get_submodule(name), adapter, partial(adapter.of_expert, expert=index))
    elif hasattr(experts, FC1):  # Transformer Engine's grouped layers
        for name, adapter in adapters.items():
            add_to_output(experts.get_submodule(name), adapter, partial(_term_of_counts, adapter))
    else:
        raise TypeError(f"adapters are not supported for experts of the class {type(experts).__name__}")


def _term_of_counts(adapter: Adapter, rows: Tensor, counts: Any, *_others: Any) -> Tensor:
    ends = torch.as_tensor(counts, device=rows.device).cumsum(0).to(torch.int32)
    return adapter.of_experts(rows, ends)


def add_to_output(linear: nn.Module, adapter: Adapter, term: Callable[..., Tensor]) -> None:
    """Add `term(*inputs)` to the output of a linear layer while the adapter's switch is on."""

    def add(module: nn.Module, inputs: tuple[Any, ...], output: tuple[Tensor, Any]) -> tuple[Tensor, Any] | None:
        return (output[0] + term(*inputs), output[1]) if adapter.switch.is_on else None

    linear.register_forward_hook(add)
