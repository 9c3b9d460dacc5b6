# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Exact gradient of the routers by source, from one pass for each source with the other sources switched off."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model
from torch import Tensor

from nemo_rl_moe.distributed.batch import GlobalBatchShard
from nemo_rl_moe.distributed.bin_packing import round_up
from nemo_rl_moe.models.interfaces import LossFunction, LossInputs, LossOutputs, needs_of
from nemo_rl_moe.models.megatron.model.transformer_config import Z_LOSS, auxiliary_loss_names
from nemo_rl_moe.models.megatron.training.forward_backward import ForwardBackward
from nemo_rl_moe.models.megatron.training.router_hooks import cut_of_rank
from nemo_rl_moe.models.megatron.training.router_loss_check import RouterLossCheck
from nemo_rl_moe.models.megatron.training.side_passes import side_pass
from nemo_rl_moe.models.megatron.training.step_observer import StepObservations, StepObserver, is_due
from nemo_rl_moe.routing.metrics.gradient_sources import (
    AUXILIARY,
    POLICY,
    Z,
    agreement_metrics,
    gradient_metrics,
    inner_products,
)
from nemo_rl_moe.routing.routers import moe_layer_indices, routers_of

_ROUNDING = {True: 1e-4, False: 0.05}
"""Whether training is in float32 -> smallest norm of the balancing losses' gradient that is compared, relative to the
norm of the gradient's terms before they cancel. A shorter gradient is mostly rounding."""


class RouterGradients(StepObserver):
    """Measurement of the gradient of every router's weight, split by source (the algorithm's loss, auxiliary losses).

    Each part is the optimizer's gradient from one source over the measured microbatches, scaled to a full global batch.
    The parts add up to the gradient of a pass with all sources over the same microbatches. If all microbatches of the
    global batch are measured, the sum is the step's gradient.
    """

    def __init__(
        self,
        passes: ForwardBackward,
        chunks: Sequence[DistributedDataParallel],
        every: int,
        num_microbatches: int | None,
        per_layer: bool,
    ):
        config = passes.config
        self._passes = replace(passes, counts=False)
        self._chunks, self._config, self._device = chunks, config, passes.device
        self._every, self._num_microbatches, self._per_layer = every, num_microbatches, per_layer
        self._is_due = False
        self._metrics: dict[str, float] = {}
        self._layers = moe_layer_indices(config)
        self._routers = placed_routers(chunks, config)
        # With jitter the router changes its recorded input. For other score functions no paper defines the losses.
        is_known = config.moe_input_jitter_eps is None and config.moe_router_score_function in ("softmax", "sigmoid")
        # Otherwise the last router's gradient has a part from the router of the layer after it.
        is_known = is_known and not any(_mtp_trains_the_model(chunk) for chunk in chunks)
        last = dict(self._routers).get(len(self._layers) - 1) if is_known else None
        self._check = RouterLossCheck(last, config, cut_of_rank(config), passes.device)
        self.sources = sources_of(config)

    def start_step(self, number: int, shards: Sequence[GlobalBatchShard]) -> None:
        self._is_due, self._metrics = is_due(number, self._every), {}

    def start_global_batch(self, shard: GlobalBatchShard, loss_function: LossFunction) -> None:
        """Measure the gradients of the step's first global batch, if the step is due. Every rank calls it.

        Weights, random states and counts stay the same, bit by bit.
        """
        if not self._is_due:
            return
        self._is_due = False
        started = time.perf_counter()
        parts = self.parts(shard, loss_function)
        dist.all_reduce(parts)
        products = inner_products(parts.flatten(2))
        agreement = self._agreement(shard, parts[1:, -1]) if len(self.sources) > 1 else {}
        if dist.get_rank() > 0:  # once is enough
            return
        self._metrics = gradient_metrics(products.cpu(), self.sources, self._layers, per_layer=self._per_layer)
        self._metrics |= agreement
        self._metrics["router_gradient/seconds"] = time.perf_counter() - started

    def end_step(self) -> StepObservations:
        return StepObservations(self._metrics)

    def parts(self, shard: GlobalBatchShard, loss_function: LossFunction) -> Tensor:
        """Return this rank's term of each part, `[sources, MoE layers, experts, hidden]`, for a sum over all ranks."""
        config = self._config
        shape = (len(self.sources), len(self._layers), config.num_moe_experts, config.hidden_size)
        parts = torch.zeros(shape, dtype=torch.float32, device=self._device)
        for source, of_source in zip(self.sources, parts, strict=True):
            is_policy = source == POLICY
            trained = loss_function if is_policy else _WithoutGradient(loss_function)
            passes = self._passes if is_policy else replace(self._passes, mtp_loss_weight=0.0)
            weights = [router.weight for _, router in self._routers]
            with (
                side_pass(self._chunks, config),
                nullcontext() if source == POLICY else self._check.recording(),
                _only_auxiliary_losses_of(source, config),
                _gradients_of(weights) as gradients,
            ):
                passes.train(self._chunks, shard, trained, num_microbatches=self._number_of(shard))
                for (position, _), gradient in zip(self._routers, gradients(), strict=True):
                    of_source[position] = gradient
        return parts.mul_(share_of_rank(config))

    def _agreement(self, shard: GlobalBatchShard, found: Tensor) -> dict[str, float]:
        """Return metrics of a comparison of the last router's gradients with the equations of its losses.

        Every rank calls it.

        Args:
            found: Gradients summed over the ranks, `[router losses, experts, hidden]`.
        """
        microbatches = self._passes.prepare(shard.microbatches[: self._number_of(shard)])
        expected = torch.stack(self._check.gradients(shard, microbatches)) * counts_on_rank(self._config)
        dist.all_reduce(expected)
        balancing, z_loss, uncancelled = expected.cpu()
        floor = _ROUNDING[self._config.params_dtype is torch.float32] * float(uncancelled.norm())
        wanted = {AUXILIARY: (balancing, floor), Z: (z_loss, 0.0)}
        metrics: dict[str, float] = {}
        for source, gradient in zip(self.sources[1:], found.cpu(), strict=True):
            metrics |= agreement_metrics(source, gradient, *wanted[source])
        return metrics

    def _number_of(self, shard: GlobalBatchShard) -> int:
        available = len(shard.microbatches)
        wanted = self._num_microbatches or available
        if self._config.virtual_pipeline_model_parallel_size is not None:
            wanted = round_up(wanted, self._config.pipeline_model_parallel_size)
        return min(wanted, available)


def _mtp_trains_the_model(chunk: DistributedDataParallel) -> bool:
    """Return whether a chunk has layers of multi-token prediction whose losses have gradients in the decoder."""
    mtp = getattr(unwrap_model(chunk), "mtp", None)
    return mtp is not None and not mtp.is_detached


def placed_routers(chunks: Sequence[DistributedDataParallel], config: TransformerConfig) -> list[tuple[int, Any]]:
    """Return the routers of a rank's chunks, each with the index of its layer in the model's MoE layers."""
    of_layer = {layer: position for position, layer in enumerate(moe_layer_indices(config))}
    return [
        (of_layer[layer.key], router)  # type: ignore[index]  # Megatron-Core numbers its layers
        for chunk in chunks
        for layer, router in routers_of(unwrap_model(chunk).decoder)
    ]


def sources_of(config: TransformerConfig) -> tuple[str, ...]:
    """Return the sources of a router's gradient: the algorithm's loss and the enabled auxiliary losses."""
    names = auxiliary_loss_names(config)
    balancing = [AUXILIARY] if any(name != Z_LOSS for name in names) else []
    return (POLICY, *balancing, *([Z] if Z_LOSS in names else []))


def counts_on_rank(config: TransformerConfig) -> float:
    """Return a rank's factor in a sum over ranks: 0 if another tensor-parallel rank counts the same tokens, else 1."""
    return float(config.sequence_parallel or parallel_state.get_tensor_model_parallel_rank() == 0)


def share_of_rank(config: TransformerConfig) -> float:
    """Return the weight of this rank's gradients in a sum over all ranks that equals the data-parallel wrapper's mean.

    The mean is over data-parallel and context-parallel ranks. Tensor-parallel ranks see different tokens under sequence
    parallelism, so all of them count. Otherwise they see the same tokens, so only one of them counts.
    """
    return counts_on_rank(config) / parallel_state.get_data_parallel_world_size(with_context_parallel=True)


@contextmanager
def _gradients_of(weights: Sequence[Tensor]) -> Iterator[Callable[[], list[Tensor]]]:
    """Let weights get gradients while the context is open, also frozen ones. Yield a function that returns them."""
    frozen = [weight for weight in weights if not weight.requires_grad]
    for weight in frozen:
        weight.requires_grad_(True)
    frozen_ids = {id(weight) for weight in frozen}

    def found() -> list[Tensor]:
        # The data-parallel wrapper does not know frozen weights, so torch keeps their gradients.
        return [_or_zero(weight) if id(weight) in frozen_ids else weight.main_grad for weight in weights]  # type: ignore[attr-defined]

    try:
        yield found
    finally:
        for weight in frozen:
            weight.requires_grad_(False)
            weight.grad = None


def _or_zero(weight: Tensor) -> Tensor:
    return torch.zeros_like(weight) if weight.grad is None else weight.grad


@contextmanager
def _only_auxiliary_losses_of(source: str, config: TransformerConfig) -> Iterator[None]:
    """Switch off the auxiliary losses of all other sources while the context is open."""
    balancing, z = config.moe_aux_loss_coeff, config.moe_z_loss_coeff
    if source != AUXILIARY:
        config.moe_aux_loss_coeff = [0.0] * len(balancing) if isinstance(balancing, list) else 0.0
    if source != Z:
        config.moe_z_loss_coeff = None
    try:
        yield
    finally:
        config.moe_aux_loss_coeff, config.moe_z_loss_coeff = balancing, z


class _WithoutGradient:
    """A loss function with a loss of 0: the remaining gradient comes from the auxiliary losses."""

    def __init__(self, loss_function: LossFunction):
        self._loss_function = loss_function
        self.needs = needs_of(loss_function)

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        outputs = self._loss_function(inputs)
        return replace(outputs, loss=outputs.loss * 0)
