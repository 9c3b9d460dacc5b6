# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Observers of a rank's training step. They see every phase of the step, and report at its end."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from torch import Tensor

from nemo_rl_moe.distributed.batch import GlobalBatchShard
from nemo_rl_moe.models.interfaces import LossFunction
from nemo_rl_moe.models.megatron.training.microbatch import ModelMicrobatch
from nemo_rl_moe.runs.folder.artifacts import StepArtifacts


@dataclass(frozen=True)
class TrainingForward:
    """Forward pass of one model chunk over one microbatch, before a backward pass.

    Attributes:
        chunk: Index of the chunk on this pipeline stage.
        number: Number of the microbatch within the `train` call, the same on all pipeline stages.
    """

    chunk: int
    number: int
    microbatch: ModelMicrobatch


@dataclass(frozen=True)
class StepObservations:
    """Report of one observer about one step.

    Attributes:
        metrics: Name without the `moe/` prefix -> value. The driver reads the metrics of rank 0. Other ranks may omit
            them.
        artifacts: Registered name -> array of the step, on rank 0 only.
    """

    metrics: Mapping[str, float] = field(default_factory=dict)
    artifacts: StepArtifacts = field(default_factory=dict)


class StepObserver:
    """Observer of the `train` calls of one rank. Its methods do nothing unless a subclass overrides them.

    All ranks call the same observers in the same order, because `start_global_batch` and `end_step` may enter
    collectives.
    """

    def start_step(self, number: int, shards: Sequence[GlobalBatchShard]) -> None:
        """Prepare for a `train` call, with its number in the run and its global batches."""

    def start_global_batch(self, shard: GlobalBatchShard, loss_function: LossFunction) -> None:
        """See the next global batch before it is trained on."""

    def training_forward(self, forward: TrainingForward) -> AbstractContextManager[None]:
        """Return a context that is open during this forward pass, but not while the pass is recomputed."""
        return nullcontext()

    def after_forward(self, forward: TrainingForward, heads: Sequence[Tensor]) -> None:
        """Receive the outputs of a chunk with a gradient. The first of them to get it begins the backward pass."""

    def end_step(self) -> StepObservations:
        """Return the observations. Every rank calls it."""
        return StepObservations()


def is_due(number: int, every: int | None) -> bool:
    """Return True for each `every`th `train` call of a run, and never if `every` is None."""
    return every is not None and number % every == 0
