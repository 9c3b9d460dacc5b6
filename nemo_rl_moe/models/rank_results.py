# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Results that a rank's model sends to the driver. This module does not import Megatron-Core, because the driver
unpickles the results."""

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
        data_parallel_rank: Rank in the data-parallel group, which determines the rank's part of the batch.
        pipeline_rank: Index of the pipeline stage, without virtual stages.
        is_last_stage: Whether this rank computes the loss.
        context_rank: Rank in the context-parallel group.
    """

    data_parallel_rank: int
    data_parallel_size: int
    pipeline_rank: int
    tensor_rank: int
    is_last_stage: bool
    context_rank: int = 0

    @property
    def reports_loss(self) -> bool:
        """Whether the loss metrics of this rank count. This is true on one rank of each data-parallel replica."""
        return self.is_last_stage and self.tensor_rank == 0 and self.context_rank == 0


@dataclass(frozen=True)
class RankDescription:
    """Description of a rank's started model.

    Attributes:
        moe_configuration: The router and expert settings in force.
        moe_configuration_sources: Name of a setting -> its source.
        notices: Notices for the user on the loaded weights.
        forward_flops: Operations of the full model's forward pass.
        gpu: CUDA's name of the GPU, or None on a CPU.
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

    For the fields that are equal on every rank, such as `global_loss`, see `interfaces.TrainResult`.

    Attributes:
        num_microbatches: Number of microbatches of this data-parallel rank.
        microbatch_metrics: The loss function's metrics of this rank's microbatches. Empty if the rank computes no loss.
        moe_metrics: Router and expert metrics over all ranks. In a run only rank 0 returns them.
        artifacts: Name -> array or table of router and expert statistics, only on rank 0.
        memory: Metrics of this rank's memory (`peak_memory_metrics`).
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
