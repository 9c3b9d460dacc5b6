# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Results of one rank's model as they travel to the driver. Imports no Megatron-Core: the driver unpickles them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from nemo_rl_moe.metrics import MetricSeries
from nemo_rl_moe.models.flops import ForwardFlops
from nemo_rl_moe.runs.folder.artifacts import StepArtifacts


@dataclass(frozen=True)
class ParallelCoordinates:
    """Coordinates of this rank in the parallel layout.

    Attributes:
        data_parallel_rank: Index of this rank's share of the batch.
        pipeline_rank: Without virtual stages.
        is_last_stage: True where the loss is computed.
        context_rank: Rank among those that share each sequence.
    """

    data_parallel_rank: int
    data_parallel_size: int
    pipeline_rank: int
    tensor_rank: int
    is_last_stage: bool
    context_rank: int = 0

    @property
    def reports_loss(self) -> bool:
        """True on one rank for each share of the batch: the one whose metrics of the loss are counted."""
        return self.is_last_stage and self.tensor_rank == 0 and self.context_rank == 0


@dataclass(frozen=True)
class RankDescription:
    """Description of a rank's model that has started.

    Attributes:
        coordinates: Its place in the layout.
        moe_configuration: The router and expert settings that are really in force.
        moe_configuration_sources: Who has set each of them.
        notices: What a user should know of the weights that were read.
        forward_flops: Operations of the whole model's forward pass.
        gpu: CUDA's name of the card that it computes on; None on a CPU.
    """

    coordinates: ParallelCoordinates
    moe_configuration: dict[str, Any] = field(default_factory=dict)
    moe_configuration_sources: dict[str, str] = field(default_factory=dict)
    notices: Sequence[str] = ()
    forward_flops: ForwardFlops | None = None
    gpu: str | None = None


@dataclass(frozen=True)
class RankTrainResult:
    """Result of one `train` call on one rank.

    Attributes:
        global_loss: Loss of the global batch over all ranks; of several, the mean over the trained tokens or sequences
            of all. NaN without any. The same on every rank.
        grad_norm: Norm before clipping; of several steps, the mean with the same weights. The same on every rank.
        num_microbatches: Microbatches of this data-parallel rank.
        microbatch_metrics: The loss function's metrics of this rank's microbatches; empty where no loss is computed.
        moe_metrics: Metrics of the observers, without the `moe/` prefix. Rank 0 has all of them.
        num_updates: Global batches with a trained token. The same on every rank.
        num_skipped_updates: Optimizer steps left out for a loss or gradient that was not finite. The same on every
            rank.
        skipped_in_a_row: Number of the last steps of the call that were left out. The same on every rank.
        weight_version: Optimizer steps that the weights have seen since the start of the run. The same on every rank.
        artifacts: Arrays of the observers, by their registered names, on rank 0 alone.
        memory: Metrics of this rank's memory, of `peak_memory_metrics`.
    """

    global_loss: float
    grad_norm: float
    lr: float
    num_microbatches: int
    microbatch_metrics: dict[str, MetricSeries]
    moe_metrics: dict[str, float]
    num_updates: int
    num_skipped_updates: int
    skipped_in_a_row: int
    weight_version: int
    artifacts: StepArtifacts = field(default_factory=dict)
    memory: dict[str, MetricSeries] = field(default_factory=dict)
