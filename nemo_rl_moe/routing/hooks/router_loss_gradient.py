# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures the effective coefficient of transformers' load balancing loss from gradients of router logits.

If the weights of a token's experts add up to 1, the model's main loss has no gradient at the other experts' logits.
Only the balancing loss has a gradient there, so it can be compared with its equation in any training loop.
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
"""Largest deviation from 1 of the sum of a token's expert weights. The rounding of bfloat16 is smaller."""
_MOST_WAITING = 8
"""Largest number of forward passes that wait for their backward pass. Older ones are dropped as never getting one."""


@dataclass(frozen=True)
class TrainedCoefficient:
    """Result of comparing gradients of router logits with the equation of the load balancing loss.

    Attributes:
        coefficient: Coefficient with which the loss trains, summed over forward passes. If the loss of each pass is
            weighted by its share of an optimizer step, the sum is the coefficient of the step.
        error: Length of the part of the gradient that neither the balancing loss nor a z-loss explains, over the
            length of the gradient.
        is_exact: Whether the logits are in float32. Otherwise transformers rounds the gradient by several percent.
    """

    coefficient: float
    error: float
    is_exact: bool


@dataclass
class _Pass:
    """One forward pass: logits, chosen experts and the logits' gradients so far, by layer, `[tokens, experts]` each."""

    is_token: Float[Tensor, " tokens"] | None
    logits: dict[RouterLayer, Float[Tensor, "tokens experts"]] = field(default_factory=dict)
    chosen: dict[RouterLayer, Bool[Tensor, "tokens experts"]] = field(default_factory=dict)
    gradients: dict[RouterLayer, Float[Tensor, "tokens experts"]] = field(default_factory=dict)
    has_hook: set[RouterLayer] = field(default_factory=set)


class RouterLossGradient(ForwardWatcher):
    """Measures the coefficient of the load balancing loss in one model, from gradients of its router logits.

    The equation is transformers' `load_balancing_loss_func`: `E * sum_e F_e P_e`, where `F_e` is the number of
    assignments of expert `e` over the number of tokens, and `P_e` its mean probability, both over all layers. The
    gradient of a z-loss, of any strength, is fitted too and does not count.

    Raises:
        ValueError: No router is known.
    """

    def __init__(self, model: nn.Module):
        routers = known_routers(model)
        super().__init__([layer for layer, _ in routers])
        self._passes: list[_Pass] = []
        self._is_readable: dict[RouterLayer, bool] = {}
        self._coefficient, self._residual, self._length, self._is_exact = 0.0, 0.0, 0.0, True
        watch_model(entry_of(model, routers[0][1]), routers, self)

    def take(self) -> TrainedCoefficient | None:
        """Return the coefficient since the last call, or None without gradients."""
        self._compare_finished()
        found = None
        if self._length > 0:
            error = (self._residual / self._length) ** 0.5
            found = TrainedCoefficient(self._coefficient, error, self._is_exact)
        self._coefficient, self._residual, self._length, self._is_exact = 0.0, 0.0, 0.0, True
        return found

    def enter_model(self, arguments: Mapping[str, Any]) -> None:
        super().enter_model(arguments)
        if not self.is_recomputed():
            self._compare_finished()
            self._passes.append(_Pass(None))

    def add(self, layer: RouterLayer, router: nn.Module, args: Any, kwargs: Mapping[str, Any], outputs: Any) -> None:
        """Record one call of a router. A call that activation checkpointing repeats only adds the gradient."""
        if layer.kind is not RouterKind.TRANSFORMERS or not router.training or len(outputs) < 2 or not self._passes:
            return
        logits, weights, of_pass = outputs[0], outputs[1], self._passes[-1]
        if layer not in self._is_readable:  # checked once, because on a GPU the host waits
            self._is_readable[layer] = isinstance(logits, Tensor) and logits.ndim == 2 and _add_up_to_one(weights)
        if not self._is_readable[layer]:
            return
        if not self.is_recomputed():
            of_pass.is_token = valid_tokens(self._attention_mask, len(logits))
            of_pass.logits[layer] = logits.detach()
            experts = as_numbers(routed_experts(layer, router, outputs), layer.topk)
            of_pass.chosen[layer] = experts_as_map(experts.long(), layer.num_experts)
        if logits.requires_grad and layer in of_pass.logits and layer not in of_pass.has_hook:
            of_pass.has_hook.add(layer)
            logits.register_hook(partial(of_pass.gradients.__setitem__, layer))

    @torch.no_grad()
    def _compare_finished(self) -> None:
        """Compare and drop the forward passes whose backward pass has run. The other passes wait."""
        for of_pass in self._passes:
            if of_pass.gradients:
                self._compare(of_pass)
        self._passes = [each for each in self._passes if each.logits and not each.gradients][-_MOST_WAITING:]

    def _compare(self, of_pass: _Pass) -> None:
        layers = list(of_pass.logits)
        some = of_pass.logits[layers[0]]
        is_token = torch.ones(len(some), device=some.device) if of_pass.is_token is None else of_pass.is_token
        rows = is_token.float().sum() * len(layers)
        load = sum(is_token.float() @ of_pass.chosen[layer].float() for layer in layers) / rows
        products = torch.zeros(3, 3, dtype=torch.float64, device=some.device)
        for layer, gradient in of_pass.gradients.items():
            logits = of_pass.logits[layer].float()
            scores = logits.softmax(-1)
            balancing = scores * (load - (scores @ load)[:, None]) * layer.num_experts / rows
            z_loss = scores * logits.logsumexp(-1, keepdim=True) * 2 / rows
            compared = ~of_pass.chosen[layer] & is_token.bool()[:, None]
            each = torch.stack([(part * compared).flatten() for part in (balancing, z_loss, gradient)]).double()
            products += each @ each.T
            self._is_exact &= of_pass.logits[layer].dtype == torch.float32
        found = products.cpu()
        if not found[0, 0] > 0:
            return
        shares = torch.linalg.lstsq(found[:2, :2], found[:2, 2:]).solution[:, 0]
        explained = float(shares @ found[:2, 2])
        self._coefficient += float(shares[0])
        self._residual += max(float(found[2, 2]) - explained, 0.0)
        self._length += float(found[2, 2])


def _add_up_to_one(weights: Any) -> bool:
    if not isinstance(weights, Tensor) or not weights.is_floating_point():
        return False
    sums = weights.detach().float().sum(-1)
    return bool(((sums - 1).abs() < _SUM_OF_WEIGHTS).all())
