# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Mean share of the routers' scores that the chosen experts have, over the tokens of a step's training passes."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from nemo_rl_moe.models.megatron.training.token_means import TokenMeans
from nemo_rl_moe.routing.metrics.router_confidence import chosen_share
from nemo_rl_moe.routing.replay import experts_as_map
from nemo_rl_moe.routing.routers import RouterLayer, routed_experts, routers_of, token_copies


class RoutingConfidence(TokenMeans):
    """Mean of `chosen_share` in each layer: 1 if a token's experts have all of its scores.

    The experts are those that the layer uses: replayed ones under replay, and without dropped assignments.
    """

    metric = "routing_confidence"

    def __init__(self, chunks: Sequence[GPTModel], config: TransformerConfig, device: torch.device, *, per_layer: bool):
        super().__init__(config, device, per_layer=per_layer)
        self._score_function = config.moe_router_score_function
        self._logits: dict[int, Tensor] = {}
        for chunk in chunks:
            for layer, router in routers_of(chunk.decoder):
                assert isinstance(layer.key, int)  # Megatron-Core numbers its layers
                row = self.layers.index(layer.key)
                gating: Any = router.gating
                router.gating = partial(self._gating, row, gating)  # type: ignore[assignment]
                router.register_forward_hook(partial(self._measure, row, layer))

    def _gating(self, row: int, gating: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
        """Return a router's logits, and keep them until its choice is known."""
        logits = gating(inputs)
        if self.is_open:
            self._logits[row] = logits.detach()
        return logits

    @torch.no_grad()
    def _measure(self, row: int, layer: RouterLayer, router: nn.Module, _: Any, outputs: Any) -> None:
        if row not in self._logits:
            return
        logits, copies = self._logits.pop(row).flatten(0, -2), token_copies(router)
        logits = logits if copies is None else logits[copies]
        chosen = routed_experts(layer, router, outputs)
        if chosen.dtype != torch.bool:
            chosen = experts_as_map(chosen.long(), layer.num_experts)
        self.add(row, chosen_share(logits, chosen, self._score_function), of_copies=True)
