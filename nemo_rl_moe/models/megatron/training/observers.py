# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The observers of a training step, in the fixed order in which they enter their collectives."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from nemo_rl_moe.config.schema_grpo import generating
from nemo_rl_moe.config.schema_policy import MegatronConfig, PolicyConfig
from nemo_rl_moe.distributed.batch import GlobalBatchShard
from nemo_rl_moe.models.images import IS_IMAGE
from nemo_rl_moe.models.megatron.layers.routers import ExpertBias
from nemo_rl_moe.models.megatron.moe_metrics import get_moe_metrics
from nemo_rl_moe.models.megatron.training.expert_advantages import ExpertAdvantageRecorder
from nemo_rl_moe.models.megatron.training.expert_load import attach_expert_load_recorder
from nemo_rl_moe.models.megatron.training.expert_writers import ExpertWriterRecorder
from nemo_rl_moe.models.megatron.training.forward_backward import ForwardBackward
from nemo_rl_moe.models.megatron.training.indexer_hooks import IndexerHooks
from nemo_rl_moe.models.megatron.training.router_gradients import RouterGradients
from nemo_rl_moe.models.megatron.training.router_hooks import RouterHooks, cut_of_rank
from nemo_rl_moe.models.megatron.training.routing_confidence import RoutingConfidence
from nemo_rl_moe.models.megatron.training.shared_expert_gates import SharedExpertGates
from nemo_rl_moe.models.megatron.training.step_observer import StepObservations, StepObserver, TrainingForward, is_due
from nemo_rl_moe.routing.metrics.expert_load_recorder import ExpertLoadRecorder
from nemo_rl_moe.routing.metrics.rollout_load import rollout_load_metrics
from nemo_rl_moe.routing.routers import moe_layer_indices
from nemo_rl_moe.runs.folder.artifacts import EXPERT_LOAD, ROUTING


def make_observers(
    policy: PolicyConfig,
    passes: ForwardBackward,
    chunks: Sequence[GPTModel],
    ddp_chunks: Sequence[DistributedDataParallel],
    expert_bias: ExpertBias,
) -> list[StepObserver]:
    """Attach and return the observers that a configuration asks for. A model without MoE layers gets none.

    All ranks have the same order, because observers enter collectives. Router gradients come first, because the other
    observers must not see the additional passes of the router gradients.
    """
    megatron, config, device = policy.megatron_cfg, passes.config, passes.device
    if not moe_layer_indices(config):
        return []
    per_layer, gradients, generates = megatron.moe_per_layer_logging, megatron.router_gradients, generating(policy)
    observers: list[StepObserver] = []
    if gradients.every_n_steps is not None:
        observers.append(
            RouterGradients(passes, ddp_chunks, gradients.every_n_steps, gradients.num_microbatches, per_layer)
        )
    if passes.hooks is not None:
        observers.append(RoutingReports(passes.hooks, passes.indexer_hooks, per_layer=per_layer))
    if megatron.track_moe_metrics:
        observers += [ExpertLoadReports(chunks, passes, megatron, per_layer=per_layer), ExpertBiasReports(expert_bias)]
        observers.append(RoutingConfidence(chunks, config, device, per_layer=per_layer))
        if config.moe_shared_expert_gate:
            observers.append(SharedExpertGates(chunks, config, device, per_layer=per_layer))
        if generates is not None and generates.megatron_cfg.experts_by_advantage:
            observers.append(ExpertAdvantageRecorder(chunks, config, device, per_layer=per_layer))
        if generates is not None and generates.megatron_cfg.experts_by_writer:
            observers.append(ExpertWriterRecorder(chunks, config, device, per_layer=per_layer))
    return observers


class ExpertLoadReports(StepObserver):
    """Load of every expert, overload factors and auxiliary losses in training forward passes."""

    def __init__(
        self, chunks: Sequence[GPTModel], passes: ForwardBackward, settings: MegatronConfig, *, per_layer: bool
    ):
        self._config, self._device = passes.config, passes.device
        self._settings, self._per_layer = settings, per_layer
        recorder = attach_expert_load_recorder(chunks, passes.config, passes.device)
        assert recorder is not None  # the model has MoE layers
        self.recorder: ExpertLoadRecorder = recorder
        self._number = self._num_microbatches = 0

    def start_step(self, number: int, shards: Sequence[GlobalBatchShard]) -> None:
        self._number, self._num_microbatches = number, sum(len(shard.microbatches) for shard in shards)
        # All ranks of a batch have the same columns.
        counts_images = IS_IMAGE in shards[0].microbatches[0].columns
        self.recorder.start(self._num_microbatches, counts_images=counts_images)

    def training_forward(self, forward: TrainingForward) -> AbstractContextManager[None]:
        is_image = forward.microbatch.model_columns.get(IS_IMAGE)
        if is_image is not None:
            is_image = forward.microbatch.in_router_order(is_image, cut_of_rank(self._config))
        return self.recorder.training_forward(forward.chunk, forward.number, is_image)

    def after_forward(self, forward: TrainingForward, heads: Sequence[Tensor]) -> None:
        self.recorder.watch_backward(heads, forward.chunk, forward.number)

    def end_step(self) -> StepObservations:
        """Return the metrics of `get_moe_metrics`, the same on every rank, and the load matrix on rank 0."""
        chosen = self._settings.moe_metrics
        metrics = get_moe_metrics(
            loss_scale=1 / self._num_microbatches,
            per_layer_logging=self._per_layer,
            config=self._config,
            device=self._device,
            recorder=self.recorder,
            detailed=chosen.mode == "detailed" or is_due(self._number, chosen.detailed_every_steps),
            top_k_experts=chosen.top_k_experts,
            overload=self._settings.log_moe_overload_factor,
            what_if_expert_parallel_sizes=chosen.what_if_expert_parallel_sizes,
        )
        if dist.get_rank() > 0:  # once is enough
            return StepObservations(metrics)
        return StepObservations(metrics, {EXPERT_LOAD.name: self.recorder.expert_load})


class RoutingReports(StepObserver):
    """Report on a step's captured experts, and on the agreement of the routers' free choices with them.

    Captured positions of indexers are reported too.
    """

    def __init__(self, hooks: RouterHooks, indexers: IndexerHooks | None, *, per_layer: bool):
        self._hooks, self._indexers, self._per_layer = hooks, indexers, per_layer

    def start_step(self, number: int, shards: Sequence[GlobalBatchShard]) -> None:
        self._hooks.start_step(len(shards))
        if self._indexers is not None:
            self._indexers.start_step(len(shards))

    def end_step(self) -> StepObservations:
        """Return the report on rank 0. It is empty if the batch has no routes."""
        report = self._hooks.report(per_layer=self._per_layer)
        of_indexers = None if self._indexers is None else self._indexers.report(per_layer=self._per_layer)
        if report is None:
            return StepObservations()
        if of_indexers is not None:
            report = report.with_more(of_indexers.metrics, of_indexers.anomalies)
        load = rollout_load_metrics(report.totals.captured_experts, report.layers, per_layer=self._per_layer)
        return StepObservations(report.metrics | load, {ROUTING.name: report})


class ExpertBiasReports(StepObserver):
    def __init__(self, expert_bias: ExpertBias):
        self._expert_bias = expert_bias

    def start_step(self, number: int, shards: Sequence[GlobalBatchShard]) -> None:
        self._expert_bias.start_step()

    def end_step(self) -> StepObservations:
        return StepObservations(self._expert_bias.metrics())
