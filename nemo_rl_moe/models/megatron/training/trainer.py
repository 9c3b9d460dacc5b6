# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""One rank's model with its optimizer and schedule, and the steps that they take. Knows nothing of Ray."""

import math
from collections.abc import Collection, Mapping, Sequence
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
from nemo_rl_moe.models.megatron.layers.routers import ExpertBias, force_routing
from nemo_rl_moe.models.megatron.lora.reference import BaseAsReference
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
    """Result of one global batch; `series` has the loss function's metrics of this rank's microbatches.

    Attributes:
        num_of: Number of what each kind of mean is over.
    """

    num_of: Mapping[Reduction, int]
    loss: float
    grad_norm: float
    lr: float
    series: dict[str, MetricSeries]
    is_skipped: bool

    @property
    def has_targets(self) -> bool:
        """Whether any token of the global batch counts in its loss."""
        return self.num_of[Reduction.SHARE] > 0


class MegatronTrainer(MegatronModel):
    """One rank's part of a model that Megatron-Core trains.

    Args:
        weights_folder: Folder to read weights from; None for random ones.
        num_steps: Optimizer steps of the whole run, for the learning-rate schedule.
        tokenizer: Needed where responses end with stop strings.
        store: Store of rows that batches refer to and results leave behind.

    Attributes:
        host_state: Moves the optimizer's state between the device and the host.
        reports_moe_metrics: False: results leave these out. They are thousands with each layer's, and the same on all
            ranks: of a thousand ranks the driver would read 100 MB a step to keep the first one's.
    """

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
        self._reference = self._make_reference() if keep_reference else None
        self.host_state = HostState(self.optimizer, self.ddp_chunks, self.device)
        self._snapshots = Snapshots(self.device, self.host_state.is_frozen)
        self.reports_moe_metrics = True
        self._calls = 0
        self._write: CheckpointWrite | None = None

    def _make_reference(self) -> ReferenceWeights | BaseAsReference:
        """Return the model at the start of the run."""
        return ReferenceWeights(self.chunks) if self.adapters is None else BaseAsReference(self.adapters)

    def train(self, shards: Sequence[GlobalBatchShard], loss_function: LossFunction) -> RankTrainResult:
        """Take one optimizer step for each global batch. Every rank calls it with as many shards and
        microbatches.
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
        """Train on one global batch."""
        for observer in self.observers:
            observer.start_global_batch(shard, loss_function)
        zero_gradients(self.ddp_chunks)
        self._expert_bias.snapshot()
        results = self._forward_backward.train(self.ddp_chunks, shard, loss_function, first_microbatch)
        series = self._series(results)
        loss = self._sum_over_ranks(series)
        # Without any target the gradient is that of auxiliary losses alone, and Adam would move on by its momentum.
        has_targets = shard.global_valid_tokens > 0
        grad_norm, is_updated = step_if_finite(self.optimizer, may_update=has_targets and math.isfinite(loss))
        # Its float32 copies of gradients would be held while responses are generated.
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
        """Return `ExpertBias.around_last_update`; those of other ranks of the stage are the same."""
        return self._expert_bias.around_last_update()

    def reference_logprobs(self, microbatches: Sequence[TokenBatch]) -> list[torch.Tensor]:
        """Compute `logprobs` with the weights that the run began with."""
        assert self._reference is not None  # the run keeps one wherever its loss needs it
        with self._reference.in_place():
            return self.logprobs(microbatches)

    def compare_reference_routes(
        self, microbatches: Sequence[TokenBatch]
    ) -> tuple[list[torch.Tensor], AgreementTotals]:
        """Compute `compare_routes` with the weights that the run began with."""
        assert self._reference is not None  # asked for where the run keeps one
        with self._reference.in_place():
            return self.compare_routes(microbatches)

    def offload_optimizer(self) -> int:
        """Move the optimizer's state to the host; return the bytes that this rank's device gained."""
        return self.host_state.leave()

    def onload_optimizer(self) -> None:
        """Move it back."""
        self.host_state.come_back()

    def start_checkpoint(self, directory: Path, with_optimizer: bool) -> None:
        """Take a snapshot and begin to write it; the one before must have been finished. Every rank calls it."""
        counters = TrainerCounters(self.num_updates, self._calls, self.scheduler.num_steps) if with_optimizer else None
        self._write = start_write(sharded_contents(self._training_objects, counters), directory, self._snapshots)
        if self._snapshots.has_frozen:
            self.host_state.hold(self._write.wait)

    def checkpoint_is_written(self) -> bool:
        """Return whether this rank has written its part of the last checkpoint, well or not."""
        return self._write is None or self._write.is_written

    def finish_checkpoint(self) -> str | None:
        """Complete the checkpoint that was started; return the problems of any rank, or None. Every rank calls it."""
        assert self._write is not None  # one was started
        write, self._write = self._write, None
        return write.finish()

    def load_checkpoint(self, directory: Path, with_optimizer: bool) -> int:
        """Go back to a checkpoint; return the optimizer steps that its weights have seen. Every rank calls it.

        Raises:
            CheckpointError: It is damaged, holds anything but tensors, or belongs to another model. The same on every
                rank.
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
    """Return the most memory of a GPU that torch had allocated and reserved since the last call, in GB; empty on CPUs.

    The allocator's own counts: nothing waits for the GPU. Called at the end of a step's training, so that a step's
    peak is that of all that its process did, log-probability passes and generation too.
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
    """Return the weight of each global batch in a mean over the tokens or sequences of all; they add up to 1."""
    whole = sum(update.num_of[kind] for update in updates)
    return [update.num_of[kind] / max(whole, 1) for update in updates]


def _weighted_sum(weights: Sequence[float], values: Sequence[float]) -> float:
    """Return the sum; NaN of nothing."""
    return sum(weight * value for weight, value in zip(weights, values, strict=True)) if weights else math.nan


def _over_all(updates: Sequence[_Update], kind_of_loss: Reduction) -> dict[str, MetricSeries]:
    """Return one series for each metric over all global batches of a call."""
    # A share of a global batch's mean becomes one of the mean over all. A global batch without a trained token has
    # neither means nor extremes, but its sums count.
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
