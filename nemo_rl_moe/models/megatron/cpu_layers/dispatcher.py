# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Dispatch to experts that all lie on one rank: a sort and a gather, no communication."""

from typing import Any

import torch
from torch import Tensor

from nemo_rl_moe.models.megatron import cpu_backend  # noqa: F401  (before megatron.core)

# isort: split
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig


class DispatchFunction(torch.autograd.Function):
    """`[tokens, hidden]` to `[tokens * k, hidden]`, sorted by expert."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, source: Tensor, place: Tensor) -> Tensor:
        """Row `i` of the result is token `source[i]`; `place` `[tokens, k]` says where each token went."""
        ctx.save_for_backward(place)
        return tokens.index_select(0, source)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Adds up the gradients of each token's k rows: a gather, which is faster than scattered additions."""
        (place,) = ctx.saved_tensors
        return gather_sum(grad, place), None, None


class CombineFunction(torch.autograd.Function):
    """`[tokens * k, hidden]`, sorted by expert, to the sum of each token's k rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, source: Tensor, place: Tensor) -> Tensor:
        """The reverse of `DispatchFunction`, with the same two index tensors."""
        ctx.save_for_backward(source)
        return gather_sum(rows, place)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Every row gets its token's gradient."""
        (source,) = ctx.saved_tensors
        return grad.index_select(0, source), None, None


def gather_sum(rows: Tensor, place: Tensor) -> Tensor:
    """The sum of each token's rows; `place` `[tokens, k]` says which they are."""
    return rows.index_select(0, place.reshape(-1)).view(*place.shape, rows.size(-1)).sum(1)


class LocalTokenDispatcher(MoETokenDispatcher):
    """Token dispatcher for one expert-parallel and one expert-tensor-parallel rank.

    Takes the experts as indices `[tokens, k]` (`IndexTopKRouter`), where stock dispatchers take a map over experts.
    """

    def __init__(self, config: TransformerConfig, pg_collection: Any):
        super().__init__(config=config, pg_collection=pg_collection)
        self._num_experts = config.num_moe_experts

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Sorts copies of the tokens by expert.

        Args:
            hidden_states: `[sequence, batch, hidden]`.
            routing_map: The experts' indices `[tokens, k]`.
            probs: `[tokens, k]`.

        Returns:
            `[tokens * k, hidden]` and the probabilities `[tokens * k]`, in the same order.
        """
        self._hidden_shape = hidden_states.shape
        experts = routing_map.reshape(-1)
        # Stable, so that each expert sees its tokens in their order, as with the stock dispatcher.
        order = experts.argsort(stable=True)
        self._source = order // routing_map.size(1)
        place = torch.empty_like(order)
        place[order] = torch.arange(order.numel(), device=order.device)
        self._place = place.view_as(routing_map)
        self._tokens_per_expert = experts.bincount(minlength=self._num_experts)
        tokens = hidden_states.reshape(-1, hidden_states.size(-1))
        return DispatchFunction.apply(tokens, self._source, self._place), probs.reshape(-1).index_select(0, order)

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Nothing to send."""
        return hidden_states, probs

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Adds the number of rows of each expert, `[experts]`."""
        return hidden_states, self._tokens_per_expert, probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Nothing to do."""
        return hidden_states

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """Nothing to receive."""
        return hidden_states

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Adds up each token's rows; back to `[sequence, batch, hidden]`."""
        return CombineFunction.apply(hidden_states, self._source, self._place).view(self._hidden_shape)


class LocalMoELayer(MoELayer):
    """`MoELayer` with `LocalTokenDispatcher`; its router must be an `IndexTopKRouter`."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: Any = None,
        layer_number: int | None = None,
        pg_collection: Any = None,
        **others: Any,
    ):
        # Older versions of TransformerLayer pass the process groups only to the classes that they know.
        groups = get_default_pg_collection() if pg_collection is None else pg_collection
        super().__init__(config, submodules, layer_number, groups, **others)
        self.token_dispatcher = LocalTokenDispatcher(config, groups)
