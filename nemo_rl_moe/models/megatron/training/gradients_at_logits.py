# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Gradient of the routers by source in one pass: taken at the logits, while the step's own pass runs.

An auxiliary loss reaches a router's weight in two ways: through the logits of its own layer, and, in layers before it,
through the hidden states. The second way cannot be distinguished from that of the algorithm's loss without a pass of
its own. So the parts are exact in the last MoE layer, and elsewhere the policy's part holds what later layers' losses
send back.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from nemo_rl_moe.distributed.batch import GlobalBatchShard
from nemo_rl_moe.models.interfaces import LossFunction
from nemo_rl_moe.models.megatron.cpu import cpu_backend  # noqa: F401  (before megatron.core)
from nemo_rl_moe.models.megatron.model.transformer_config import moe_layer_indices
from nemo_rl_moe.models.megatron.training.router_gradients import placed_routers, share_of_rank, sources_of
from nemo_rl_moe.models.megatron.training.step_observer import StepObservations, StepObserver, is_due
from nemo_rl_moe.routing.metrics.gradient_sources import AUXILIARY, POLICY, Z, inner_products, last_layer_metrics

# isort: split
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.transformer_config import TransformerConfig


class GradientsAtLogits(StepObserver):
    """Hooks on the routers of this rank that take their weights' gradients apart in a step's first global batch.

    At the logits `l = W x` of a layer the weight's gradient is `sum_t d_t x_t^T` with `d_t = dL / dl_t`. `d` of the
    whole loss comes with the backward pass; that of an auxiliary loss follows from the loss alone, as soon as it is
    there; the rest is the policy's.

    Args:
        every: Measures in each so many `train` calls.
    """

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        config: TransformerConfig,
        device: torch.device,
        every: int,
        *,
        per_layer: bool,
    ):
        self._config, self._device, self._every, self._per_layer = config, device, every, per_layer
        self._layers = moe_layer_indices(config)
        self.sources = sources_of(config)
        self._is_due = self._is_open = False
        self._sums: dict[str, Tensor] = {}
        self._scale: Tensor | None = None
        self._hooks = [
            _RouterHook(router, partial(self._add, position), lambda: self._is_open)
            for position, router in placed_routers(chunks, config)
        ]

    def start_step(self, number: int, shards: Sequence[GlobalBatchShard]) -> None:
        self._is_due, self._is_open, self._sums = is_due(number, self._every), False, {}

    def start_global_batch(self, shard: GlobalBatchShard, loss_function: LossFunction) -> None:
        """Begin to record the first global batch of a step that is due."""
        if not self._is_due:
            return
        self._is_due, self._is_open = False, True
        shape = (len(self._layers), self._config.num_moe_experts, self._config.hidden_size)
        names = (_WHOLE, *self.sources[1:])
        self._sums = {name: torch.zeros(shape, dtype=torch.float32, device=self._device) for name in names}

    def after_backward(self) -> None:
        """End the recording."""
        if not self._is_open:
            return
        self._is_open = False
        # All microbatches of a pass share it; the next pass writes its own into the same tensor.
        scale = MoEAuxLossAutoScaler.main_loss_backward_scale
        self._scale = None if scale is None else scale.clone()
        for hook in self._hooks:
            hook.forget()

    def end_step(self) -> StepObservations:
        """Return the metrics of the recorded pass, on rank 0 alone; every rank calls it."""
        if not self._sums:
            return StepObservations()
        parts = self.parts()
        self._sums = {}
        dist.all_reduce(parts)
        if dist.get_rank() > 0:  # once is enough
            return StepObservations()
        products = inner_products(parts.flatten(2)).cpu()
        return StepObservations(last_layer_metrics(products, self.sources, self._layers, per_layer=self._per_layer))

    def parts(self) -> Float[Tensor, "sources layers experts hidden"]:
        """This rank's share of each part; those of all ranks add up to it."""
        auxiliary = [self._sums[name] * (1.0 if self._scale is None else self._scale) for name in self.sources[1:]]
        policy = self._sums[_WHOLE] - sum(auxiliary)
        return torch.stack([policy, *auxiliary]).mul_(share_of_rank(self._config))

    def _add(self, position: int, source: str, of_logits: Tensor, inputs: Tensor) -> None:
        with torch.no_grad():
            self._sums[source][position].addmm_(of_logits.flatten(0, -2).float().T, inputs.flatten(0, -2).float())


_WHOLE = POLICY + " and all others"


class _RouterHook:
    """Wrappers around one router's methods, which pass on their arguments, to the bit."""

    def __init__(self, router: Any, add: Callable[[str, Tensor, Tensor], None], is_open: Callable[[], bool]):
        self._add, self._is_open = add, is_open
        self._inputs: Tensor | None = None
        self._logits: Tensor | None = None
        router.gating = partial(self._gating, router.gating)
        router.apply_z_loss = partial(self._apply_z_loss, router.apply_z_loss)
        attach = router.attach_and_log_load_balancing_loss
        router.attach_and_log_load_balancing_loss = partial(self._attach, attach)

    def forget(self) -> None:
        """Let go of the last forward pass, which would keep its graph alive."""
        self._inputs = self._logits = None

    def _gating(self, gating: Callable[..., Tensor], inputs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        logits = gating(inputs, *args, **kwargs)
        # A checkpointed segment's first run, without gradients, is not the one whose backward pass comes.
        if not (self._is_open() and torch.is_grad_enabled() and logits.requires_grad):
            self.forget()
            return logits
        self._inputs = kept = inputs.detach()
        logits.register_hook(lambda gradient: self._add(_WHOLE, gradient, kept))
        # Another tensor than the one with the hook, which `torch.autograd.grad` would call.
        self._logits = logits.view_as(logits)
        return self._logits

    def _apply_z_loss(self, apply: Callable[..., Tensor], logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        attached = apply(logits, *args, **kwargs)
        if self._logits is not None and attached is not logits:
            self._take(Z, attached)
            # Of what is attached from here on, the gradient at the logits before would hold the z-loss's too.
            self._logits = attached
        return attached

    def _attach(self, attach: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        attached = attach(*args, **kwargs)
        if self._logits is not None:
            self._take(AUXILIARY, attached)
        return attached

    def _take(self, source: str, attached: Tensor) -> None:
        """Add the gradient of the loss that `MoEAuxLossAutoScaler` has just tied to a tensor, still unscaled."""
        assert self._logits is not None
        assert self._inputs is not None
        (loss,) = attached.grad_fn.saved_tensors  # type: ignore[union-attr]
        (gradient,) = torch.autograd.grad(loss, self._logits, retain_graph=True)
        self._add(source, gradient, self._inputs)
