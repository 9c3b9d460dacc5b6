# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""One rank's model with its optimizer and schedule, and its training step. The module does not depend on Ray."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float

from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.distributed.batch import GlobalBatchShard, TokenBatch
from nemo_rl_moe.distributed.stored_rows import IN_PLACE, RowStore
from nemo_rl_moe.metrics import MetricSeries, Reduction
from nemo_rl_moe.models.interfaces import Head, LossFunction, reduction_of
from nemo_rl_moe.models.megatron.checkpoint import CheckpointWrite, load_checkpoint, start_write
from nemo_rl_moe.models.megatron.checkpoint.contents import TrainerCounters, TrainingObjects, sharded_contents
from nemo_rl_moe.models.megatron.checkpoint.snapshot import Snapshots
from nemo_rl_moe.models.megatron.layers.mtp import share_embedding
from nemo_rl_moe.models.megatron.layers.routers import ExpertBias, force_routing
from nemo_rl_moe.models.megatron.training.host_state import HostState
from nemo_rl_moe.models.megatron.training.megatron_model import MegatronModel
from nemo_rl_moe.models.megatron.training.observers import make_observers
from nemo_rl_moe.models.megatron.training.optimizer import (
    build_optimizer,
    build_scheduler,
    gather_weights,
    step_if_finite,
    wrap_data_parallel,
)
from nemo_rl_moe.models.megatron.training.side_passes import zero_gradients
from nemo_rl_moe.models.megatron.weights.starting_weights import ReferenceWeights
from nemo_rl_moe.models.rank_results import RankTrainResult
from nemo_rl_moe.routing.agreement.statistics import AgreementTotals


@dataclass(frozen=True)
class _Update:
    """Result of one global batch.

    Attributes:
        num_of: Kind of mean (over tokens or over sequences) -> number of tokens or sequences in the global batch.
        series: The loss function's metrics of this rank's microbatches.
    """

    num_of: Mapping[Reduction, int]
    loss: float
    grad_norm: float
    lr: float
    series: dict[str, MetricSeries]
    is_skipped: bool

    @property
    def has_targets(self) -> bool:
        return self.num_of[Reduction.SHARE] > 0


class MegatronTrainer(MegatronModel):
    """One rank's part of a model that Megatron-Core trains.

    Args:
        num_steps: Number of optimizer steps of the run, for the learning-rate schedule.
        tokenizer: Only needed for stop strings.
        store: Store for large arrays, such as routed experts and pixels. Batches and results contain only handles.

    Attributes:
        host_state: Moves the optimizer's state between the device and the host.
        reports_moe_metrics: Whether results contain the MoE metrics. There are thousands of them, the same on all
            ranks: with a thousand ranks the driver would read 100 MB per step, and keep only the first rank's.
    """

    is_trainer = True

    def __init__(
        self,
        policy: PolicyConfig,
        hf_config: Any,
        weights_folder: Path | None,
        num_steps: int,
        *,
        tokenizer: Any = None,
        keep_reference: bool = False,
        heads: Collection[Head] = (Head.LOGPROBS,),
        store: RowStore = IN_PLACE,
    ):
        super().__init__(policy, hf_config, weights_folder, tokenizer=tokenizer, heads=heads, store=store)
        self.modules = self.ddp_chunks = wrap_data_parallel(policy, self.config, self.modules)
        self.optimizer = build_optimizer(policy, self.config, self.ddp_chunks)
        self.scheduler = build_scheduler(policy, self.optimizer, num_steps)
        force_routing(self.chunks, self.config)
        self._expert_bias = ExpertBias(self.chunks, self.config)
        self.observers = make_observers(policy, self._forward_backward, self.chunks, self.ddp_chunks, self._expert_bias)
        self._forward_backward = replace(self._forward_backward, observers=self.observers)
        self._as_reference: Callable[[], AbstractContextManager[None]] | None = None
        if keep_reference:
            # The reference of a model with adapters is its base, so it needs no copy.
            self._as_reference = ReferenceWeights(self.chunks).in_place if self.adapters is None else self.adapters.off
        self.host_state = HostState(self.optimizer, self.ddp_chunks, self.device)
        self._snapshots = Snapshots(self.device, self.host_state.is_frozen)
        self.reports_moe_metrics = True
        self._calls = 0
        self._write: CheckpointWrite | None = None

    def train(self, shards: Sequence[GlobalBatchShard], loss_function: LossFunction) -> RankTrainResult:
        """Take one optimizer step for each global batch, and return the rank's results.

        All ranks call it with the same number of shards, and each shard has the same number of microbatches on all
        ranks.
        """
        shards = [replace(shard, microbatches=self._fetched(shard.microbatches)) for shard in shards]
        self._snapshots.before_changes()
        self.host_state.come_back()
        self._calls += 1
        self._router_losses.start_step(shards)
        for observer in self.observers:
            observer.start_step(self._calls, shards)
        for chunk in self.ddp_chunks:
            chunk.train()
        updates: list[_Update] = []
        num_microbatches = 0
        for shard in shards:
            updates.append(self._update(shard, loss_function, first_microbatch=num_microbatches))
            num_microbatches += len(shard.microbatches)
        gather_weights(self.ddp_chunks)
        observed = [observer.end_step() for observer in self.observers]
        reported = observed if self.reports_moe_metrics else []
        trained = [update for update in updates if update.has_targets]
        kind = reduction_of(loss_function)
        weights = _weights(trained, kind)
        return RankTrainResult(
            global_loss=_weighted_sum(weights, [update.loss for update in trained]),
            grad_norm=_weighted_sum(weights, [update.grad_norm for update in trained]),
            lr=(trained or updates)[-1].lr,
            num_microbatches=num_microbatches,
            microbatch_metrics=_over_all(updates, kind),
            moe_metrics={name: value for found in reported for name, value in found.metrics.items()},
            artifacts={name: artifact for found in observed for name, artifact in found.artifacts.items()},
            num_updates=len(trained),
            num_skipped_updates=sum(update.is_skipped for update in updates),
            skipped_in_a_row=sum(1 for _ in takewhile(lambda update: update.is_skipped, reversed(trained))),
            weight_version=self.num_updates,
            memory=peak_memory_metrics(self.device),
        )

    def _update(self, shard: GlobalBatchShard, loss_function: LossFunction, *, first_microbatch: int) -> _Update:
        if self._trains_mtp:
            gather_weights(self.ddp_chunks)  # the embedding may still be on its way to this rank
            share_embedding(self.chunks)
        for observer in self.observers:
            observer.start_global_batch(shard, loss_function)
        zero_gradients(self.ddp_chunks)
        self._expert_bias.snapshot()
        results = self._forward_backward.train(self.ddp_chunks, shard, loss_function, first_microbatch)
        series = self._series(results)
        loss = self._sum_over_ranks(series)
        # Without a target only auxiliary losses have a gradient, and Adam would still move by its momentum.
        has_targets = shard.global_valid_tokens > 0
        grad_norm, is_updated = step_if_finite(self.optimizer, may_update=has_targets and math.isfinite(loss))
        # Otherwise the optimizer's float32 copies of gradients would stay allocated during generation.
        self.optimizer.zero_grad()
        lr = float(self.optimizer.param_groups[0]["lr"])
        if is_updated:
            self.scheduler.step(1)
            self.num_updates += 1
        else:
            self._expert_bias.restore()
        num_of = {Reduction.SHARE: shard.global_valid_tokens, Reduction.SEQUENCE_SHARE: shard.global_sequences}
        return _Update(num_of, loss, grad_norm, lr, series, is_skipped=has_targets and not is_updated)

    def expert_biases(self) -> dict[int, Float[np.ndarray, "2 experts"]]:
        """Return MoE layer index -> expert bias before and after the last update, the same on all ranks of a stage."""
        return self._expert_bias.around_last_update()

    def reference_logprobs(self, microbatches: Sequence[TokenBatch]) -> list[torch.Tensor]:
        """Return `logprobs` with the weights from the start of the run."""
        assert self._as_reference is not None  # the run keeps a reference if its loss needs one
        with self._as_reference():
            return self.logprobs(microbatches)

    def compare_reference_routes(
        self, microbatches: Sequence[TokenBatch]
    ) -> tuple[list[torch.Tensor], AgreementTotals]:
        """Return `compare_routes` with the weights from the start of the run."""
        assert self._as_reference is not None  # only called in a run with a reference
        with self._as_reference():
            return self.compare_routes(microbatches)

    def offload_optimizer(self) -> int:
        """Move the optimizer's state to the host, and return the number of freed bytes on this rank's device."""
        return self.host_state.leave()

    def onload_optimizer(self) -> None:
        """Move the optimizer's state back to the device."""
        self.host_state.come_back()

    def start_checkpoint(self, directory: Path, with_optimizer: bool) -> None:
        """Take a snapshot and begin to write it. Requires that the last checkpoint is finished. Every rank calls it."""
        counters = TrainerCounters(self.num_updates, self._calls, self.scheduler.num_steps) if with_optimizer else None
        self._write = start_write(sharded_contents(self._training_objects, counters), directory, self._snapshots)
        if self._snapshots.has_frozen:
            self.host_state.hold(self._write.wait)

    def checkpoint_is_written(self) -> bool:
        """Return whether this rank's write of the last checkpoint has ended, even if it failed."""
        return self._write is None or self._write.is_written

    def finish_checkpoint(self) -> str | None:
        """Complete the started checkpoint, and return the problems of all ranks, or None. Every rank calls it."""
        assert self._write is not None
        write, self._write = self._write, None
        return write.finish()

    def load_checkpoint(self, directory: Path, with_optimizer: bool) -> int:
        """Load a checkpoint, and return the number of its optimizer steps. Every rank calls it.

        Raises:
            CheckpointError: The checkpoint is damaged, contains anything but tensors, or belongs to another model. The
                error is the same on every rank.
        """
        self._snapshots.before_changes()
        self.host_state.come_back()
        counters = load_checkpoint(self._training_objects, directory, with_optimizer=with_optimizer)
        if counters is not None:
            self.num_updates, self._calls = counters.num_updates, counters.num_calls
        return self.num_updates

    @property
    def _training_objects(self) -> TrainingObjects:
        return TrainingObjects(self.chunks, self.optimizer, self.scheduler)

    def _sum_over_ranks(self, series: dict[str, MetricSeries]) -> float:
        own = series["loss"].reduce() if "loss" in series else 0.0
        total = torch.tensor([own], dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return float(total)


def peak_memory_metrics(device: torch.device) -> dict[str, MetricSeries]:
    """Return the peaks of GPU memory allocated and reserved by torch since the last call, in GB. Empty on CPUs.

    It is called once at the end of each step's training, so a peak includes log-probability passes and generation. It
    reads the allocator's counts and does not wait for the GPU.
    """
    if device.type != "cuda":
        return {}
    peaks = {
        "max_memory_allocated_gb": torch.cuda.max_memory_allocated(device),
        "max_memory_reserved_gb": torch.cuda.max_memory_reserved(device),
    }
    torch.cuda.reset_peak_memory_stats(device)
    return {name: MetricSeries((num_bytes / 1e9,), Reduction.MAX) for name, num_bytes in peaks.items()}


def _weights(updates: Sequence[_Update], kind: Reduction) -> list[float]:
    """Return the weight of each global batch in a mean over all tokens or sequences. The weights add up to 1."""
    total = sum(update.num_of[kind] for update in updates)
    return [update.num_of[kind] / max(total, 1) for update in updates]


def _weighted_sum(weights: Sequence[float], values: Sequence[float]) -> float:
    return sum(weight * value for weight, value in zip(weights, values, strict=True)) if weights else math.nan


def _over_all(updates: Sequence[_Update], kind_of_loss: Reduction) -> dict[str, MetricSeries]:
    """Return one series for each metric over all global batches of a `train` call."""
    # Shares of each global batch's mean become shares of the mean over all batches. A global batch without a trained
    # token has neither means nor extremes, but its sums count.
    joined = {}
    for name, first in updates[0].series.items():
        kind = kind_of_loss if name == "loss" else first.reduction
        weights = _weights(updates, kind) if kind in updates[0].num_of else [1.0] * len(updates)
        joined[name] = MetricSeries(
            tuple(
                weight * value
                for weight, update in zip(weights, updates, strict=True)
                if update.has_targets or kind in (Reduction.SUM, Reduction.PART)
                for value in update.series[name].values
            ),
            kind,
        )
    return joined
