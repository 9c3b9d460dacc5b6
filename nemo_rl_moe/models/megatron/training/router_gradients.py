# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Gradient of the routers by source, exact: a pass for each source with the others switched off."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.distributed.batch import GlobalBatchShard
from nemo_rl_moe.distributed.bin_packing import round_up
from nemo_rl_moe.models.interfaces import LossFunction, LossInputs, LossOutputs, needs_of
from nemo_rl_moe.models.megatron import cpu_backend  # noqa: F401  (before megatron.core)
from nemo_rl_moe.models.megatron.model.transformer_config import Z_LOSS, auxiliary_loss_names, moe_layer_indices
from nemo_rl_moe.models.megatron.training.forward_backward import ForwardBackward
from nemo_rl_moe.models.megatron.training.side_passes import side_pass
from nemo_rl_moe.moe.gradient_sources import AUXILIARY, POLICY, Z, gradient_metrics, inner_products
from nemo_rl_moe.moe.routers import routers_of

# isort: split
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model


class RouterGradients:
    """Measurement of the gradient of every router's weight, split by source.

    Each part is what the optimizer would get of that source alone for the microbatches that are looked at, brought to
    the size of a whole global batch: the parts add up to the gradient of a pass with all sources over the same
    microbatches, and, over all microbatches of the global batch, to that of the step itself.

    Args:
        chunks: This rank's model chunks.
        config: The model's configuration.
        device: Where they are.
        num_microbatches: First microbatches of a global batch to look at; None: all.
        per_layer: Report each layer too.
    """

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        config: TransformerConfig,
        device: torch.device,
        *,
        num_microbatches: int | None,
        per_layer: bool,
    ):
        self._chunks, self._config, self._device = chunks, config, device
        self._num_microbatches, self._per_layer = num_microbatches, per_layer
        self._layers = moe_layer_indices(config)
        self._routers = placed_routers(chunks, config)
        self.sources = sources_of(config)

    def measure(
        self, passes: ForwardBackward, shard: GlobalBatchShard, loss_function: LossFunction
    ) -> dict[str, float]:
        """Metrics of a global batch that is about to be trained on, on rank 0 alone; every rank calls it.

        Of weights, random states and counts nothing changes, to the bit.

        Args:
            passes: What runs the step's own passes.
            shard: This rank's part of the global batch.
            loss_function: What is trained.
        """
        started = time.perf_counter()
        parts = self.parts(passes, shard, loss_function)
        dist.all_reduce(parts)
        products = inner_products(parts.flatten(2))
        if dist.get_rank() > 0:  # once is enough
            return {}
        metrics = gradient_metrics(products.cpu(), self.sources, self._layers, per_layer=self._per_layer)
        return metrics | {"router_gradient/seconds": time.perf_counter() - started}

    def parts(self, passes: ForwardBackward, shard: GlobalBatchShard, loss_function: LossFunction) -> Tensor:
        """This rank's share of each part, `[sources, MoE layers, experts, hidden]`; those of all ranks add up to it."""
        config = self._config
        shape = (len(self.sources), len(self._layers), config.num_moe_experts, config.hidden_size)
        parts = torch.zeros(shape, dtype=torch.float32, device=self._device)
        passes = replace(passes, recorder=None, advantages=None, counts=False)
        for source, of_source in zip(self.sources, parts, strict=True):
            trained = loss_function if source == POLICY else _WithoutGradient(loss_function)
            with side_pass(self._chunks, config), _only_auxiliary_losses_of(source, config):
                passes.train(self._chunks, shard, trained, num_microbatches=self._number_of(shard))
                if passes.taps is not None:
                    passes.taps.clear()
                for position, router in self._routers:
                    of_source[position] = router.weight.main_grad
        return parts.mul_(share_of_rank(config))

    def _number_of(self, shard: GlobalBatchShard) -> int:
        every, config = len(shard.microbatches), self._config
        wanted = self._num_microbatches or every
        if config.virtual_pipeline_model_parallel_size is not None:
            wanted = round_up(wanted, config.pipeline_model_parallel_size)
        return min(wanted, every)


def placed_routers(chunks: Sequence[DistributedDataParallel], config: TransformerConfig) -> list[tuple[int, Any]]:
    """Routers of a rank's chunks, each with the position of its layer among the model's MoE layers."""
    of_layer = {layer: position for position, layer in enumerate(moe_layer_indices(config))}
    return [
        (of_layer[layer.key], router)  # type: ignore[index]  # Megatron-Core numbers its layers
        for chunk in chunks
        for layer, router in routers_of(unwrap_model(chunk).decoder)
    ]


def sources_of(config: TransformerConfig) -> tuple[str, ...]:
    """The sources that a model's routers have: the algorithm's loss, and the auxiliary losses that are enabled."""
    names = auxiliary_loss_names(config)
    balancing = [AUXILIARY] if any(name != Z_LOSS for name in names) else []
    return (POLICY, *balancing, *([Z] if Z_LOSS in names else []))


def attach_router_gradients(
    chunks: Sequence[DistributedDataParallel], config: TransformerConfig, policy: PolicyConfig, device: torch.device
) -> RouterGradients | None:
    """The measurement as a policy's configuration asks for it; None without, or where the model has no MoE layers."""
    chosen = policy.megatron_cfg.router_gradients
    if chosen.every_n_steps is None or not moe_layer_indices(config):
        return None
    per_layer = policy.megatron_cfg.moe_per_layer_logging
    return RouterGradients(chunks, config, device, num_microbatches=chosen.num_microbatches, per_layer=per_layer)


def share_of_rank(config: TransformerConfig) -> float:
    """Weight of this rank's gradients in the sum over all ranks, as the data-parallel wrapper takes their mean.

    Tensor-parallel ranks see tokens of their own under sequence parallelism, and otherwise all the same ones;
    context-parallel ranks always do, and are among those of the mean.
    """
    counts = config.sequence_parallel or parallel_state.get_tensor_model_parallel_rank() == 0
    return float(counts) / parallel_state.get_data_parallel_world_size(with_context_parallel=True)


@contextmanager
def _only_auxiliary_losses_of(source: str, config: TransformerConfig) -> Iterator[None]:
    """While open, the auxiliary losses of one source are on, and all others off."""
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
    """A loss function whose loss is 0: what is left of the gradient comes from the auxiliary losses."""

    def __init__(self, loss_function: LossFunction):
        self._loss_function = loss_function
        self.needs = needs_of(loss_function)

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        outputs = self._loss_function(inputs)
        return replace(outputs, loss=outputs.loss * 0)
