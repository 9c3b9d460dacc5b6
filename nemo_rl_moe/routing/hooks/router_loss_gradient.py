# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The coefficient with which transformers' load balancing loss trains, read from the gradients of router logits.

If the weights of a token's experts add up to 1, the model's own loss has no gradient at the other experts' logits.
Only the balancing loss has one there, so that it can be compared with its equation, in any training loop.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nemo_rl_moe.routing.hooks.pass_recorder import as_numbers
from nemo_rl_moe.routing.metrics.load_balance_tracking import (
    ForwardWatcher,
    entry_of,
    known_routers,
    valid_tokens,
    watch_model,
)
from nemo_rl_moe.routing.replay import experts_as_map
from nemo_rl_moe.routing.routers import RouterKind, RouterLayer, routed_experts
from nemo_rl_moe.shapes import Bool, Float

_SUM_OF_WEIGHTS = 1e-2
"""Farthest that the weights of a token's experts may add up from 1; bfloat16 alone stays below."""


@dataclass
class _Pass:
    """One forward pass: logits `[tokens, experts]` and chosen experts by layer, and the gradients that came so far."""

    is_token: Float[Tensor, " tokens"] | None
    logits: dict[RouterLayer, Float[Tensor, "tokens experts"]] = field(default_factory=dict)
    chosen: dict[RouterLayer, Bool[Tensor, "tokens experts"]] = field(default_factory=dict)
    gradients: dict[RouterLayer, Float[Tensor, "tokens experts"]] = field(default_factory=dict)
    has_hook: set[RouterLayer] = field(default_factory=set)


class RouterLossGradient(ForwardWatcher):
    """Reader of the balancing loss's gradient in one model.

    The equation is transformers' `load_balancing_loss_func`: `E * sum_e F_e P_e`, with `F_e` the assignments of expert
    `e` over the tokens, and `P_e` its mean probability, both over all layers.

    Raises:
        ValueError: No router is known.
    """

    def __init__(self, model: nn.Module):
        routers = known_routers(model)
        super().__init__([layer for layer, _ in routers])
        self._pass: _Pass | None = None
        self._is_readable: dict[RouterLayer, bool] = {}
        self._coefficient, self._residual, self._length = 0.0, 0.0, 0.0
        watch_model(entry_of(model, routers[0][1]), routers, self)

    def take(self) -> tuple[float, float] | None:
        """Return the coefficient and the error of the gradients since they were last taken; None: there was none.

        The coefficient is the sum over the passes: that of one optimizer step, if each pass has its share of the loss.
        The error is the part of the gradient that no coefficient explains, as a share of its length.
        """
        found = None
        if self._length > 0:
            found = self._coefficient, (self._residual / self._length) ** 0.5
        self._coefficient, self._residual, self._length = 0.0, 0.0, 0.0
        return found

    def enter_model(self, arguments: Mapping[str, Any]) -> None:
        super().enter_model(arguments)
        if not self.is_recomputed():
            self._pass = None

    def add(self, layer: RouterLayer, router: nn.Module, args: Any, kwargs: Mapping[str, Any], outputs: Any) -> None:
        """Take one call of a router; activation checkpointing may run it without gradients first."""
        if layer.kind is not RouterKind.TRANSFORMERS or not router.training or len(outputs) < 2:
            return
        logits, weights = outputs[0], outputs[1]
        if layer not in self._is_readable:  # once: on a GPU the host would wait
            self._is_readable[layer] = isinstance(logits, Tensor) and logits.ndim == 2 and _add_up_to_one(weights)
        if not self._is_readable[layer]:
            return
        if not self.is_recomputed():
            if self._pass is None:
                self._pass = _Pass(valid_tokens(self._attention_mask, len(logits)))
            self._pass.logits[layer] = logits.detach()
            experts = as_numbers(routed_experts(layer, router, outputs), layer.topk)
            self._pass.chosen[layer] = experts_as_map(experts.long(), layer.num_experts)
        if self._pass is not None and logits.requires_grad and layer not in self._pass.has_hook:
            self._pass.has_hook.add(layer)
            logits.register_hook(partial(self._take_gradient, self._pass, layer))

    def _take_gradient(self, of_pass: _Pass, layer: RouterLayer, gradient: Tensor) -> None:
        of_pass.gradients[layer] = gradient.detach()
        if len(of_pass.gradients) == len(of_pass.logits):
            self._compare(of_pass)

    @torch.no_grad()
    def _compare(self, of_pass: _Pass) -> None:
        layers = list(of_pass.logits)
        is_token = of_pass.is_token
        if is_token is None:
            is_token = torch.ones(len(of_pass.logits[layers[0]]), device=of_pass.logits[layers[0]].device)
        rows = is_token.float().sum() * len(layers)
        load = sum(is_token.float() @ of_pass.chosen[layer].float() for layer in layers) / rows
        totals = torch.zeros(3, dtype=torch.float64, device=is_token.device)
        for layer in layers:
            probabilities = of_pass.logits[layer].float().softmax(-1)
            slopes = probabilities * (load - (probabilities @ load)[:, None]) * layer.num_experts / rows
            compared = ~of_pass.chosen[layer] & is_token.bool()[:, None]
            expected, found = (slopes * compared).double(), (of_pass.gradients[layer] * compared).double()
            totals += torch.stack([(found * expected).sum(), expected.square().sum(), found.square().sum()])
        product, length, found_length = totals.tolist()
        if length:
            coefficient = product / length
            self._coefficient += coefficient
            self._residual += max(found_length - coefficient * product, 0.0)
            self._length += found_length
        of_pass.gradients.clear()
        of_pass.logits.clear()


def _add_up_to_one(weights: Any) -> bool:
    if not isinstance(weights, Tensor) or not weights.is_floating_point():
        return False
    sums = weights.detach().float().sum(-1)
    return bool(((sums - 1).abs() < _SUM_OF_WEIGHTS).all())
