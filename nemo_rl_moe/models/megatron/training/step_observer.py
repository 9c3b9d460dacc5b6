# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Observers of a rank's training step: they see every phase of the step, and report at its end."""

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
    """Forward pass of one model chunk over one microbatch, which a backward pass follows.

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
        metrics: Without the `moe/` prefix. The driver reads those of rank 0; other ranks may leave them out.
        artifacts: Arrays of the step by their registered names, on rank 0 alone.
    """

    metrics: Mapping[str, float] = field(default_factory=dict)
    artifacts: StepArtifacts = field(default_factory=dict)


class StepObserver:
    """Observer of the `train` calls of one rank; each method does nothing unless a subclass overrides it.

    Every rank has the same observers in the same order, and calls them in that order: `start_global_batch` and
    `end_step` may enter collectives.
    """

    def start_step(self, number: int, shards: Sequence[GlobalBatchShard]) -> None:
        """Prepare for a `train` call."""

    def start_global_batch(self, shard: GlobalBatchShard, loss_function: LossFunction) -> None:
        """See the next global batch before it is trained on."""

    def training_forward(self, forward: TrainingForward) -> AbstractContextManager[None]:
        """Return a context that is open while this forward pass runs, and no other.

        Evaluation, log-probabilities, generation and a recomputed forward pass do not run inside it.
        """
        return nullcontext()

    def after_forward(self, forward: TrainingForward, output: Tensor) -> None:
        """See the output of a chunk, whose gradient hook runs when the backward pass begins."""

    def end_step(self) -> StepObservations:
        """Return what was observed. Every rank calls it."""
        return StepObservations()


def is_due(number: int, every: int | None) -> bool:
    """Return True for each `every`th `train` call of a run; None: for none."""
    return every is not None and number % every == 0
