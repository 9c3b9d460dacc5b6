# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What an algorithm sees of a policy: nothing of Ray, nothing of Megatron-Core."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from jaxtyping import Bool, Float
from torch import Tensor

from nemo_rl_moe.distributed.batch import TokenBatch
from nemo_rl_moe.metrics import MetricSeries, Reduction
from nemo_rl_moe.moe.load_statistics import ExpertLoad


@dataclass(frozen=True)
class LossInputs:
    """What a loss function gets for one microbatch.

    Attributes:
        logprobs: Log-probability of each token given those before it, in nats; entry `t` belongs to the target
            token `t + 1` of the sequence. Carries the graph during training.
        token_mask: True where that target counts in the loss.
        global_valid_tokens: Number of counting targets in the whole global batch, over all data-parallel ranks.
        global_sequences: Number of sequences with such a target in the whole global batch.
        greedy_matches: True where the target is the token ranked first; only during evaluation.
        extras: The batch's further tensors: one value a sequence, or rows and columns as in `logprobs`.
    """

    logprobs: Float[Tensor, "sequences targets"]
    token_mask: Bool[Tensor, "sequences targets"]
    global_valid_tokens: int
    global_sequences: int
    greedy_matches: Bool[Tensor, "sequences targets"] | None
    extras: dict[str, Tensor]


@dataclass(frozen=True)
class LossOutputs:
    """What a loss function returns for one microbatch.

    Attributes:
        loss: This microbatch's share of the global batch's loss: the losses of all microbatches of all ranks *add up*
            to it.
        metrics: Name to a detached scalar and its reduction over microbatches and ranks.
    """

    loss: Float[Tensor, ""]
    metrics: dict[str, tuple[Tensor, Reduction]]


class LossFunction(Protocol):
    """A pure function from one microbatch to its share of the loss. Must be picklable: it travels to the workers."""

    def __call__(self, inputs: LossInputs) -> LossOutputs: ...


@dataclass(frozen=True)
class TrainResult:
    """What one `train` call did, the same numbers on every rank.

    Attributes:
        global_loss: Loss of the global batch, without auxiliary losses; of several, the mean.
        grad_norm: Norm of the gradient before clipping; of several optimizer steps, the mean.
        lr: Learning rate that the last optimizer step used.
        num_microbatches: Microbatches that each data-parallel rank ran in this call.
        num_tokens: Real tokens (no padding) over all ranks.
        microbatch_metrics: One series for each metric of the loss function, over all microbatches and ranks.
        moe_metrics: MoE metrics without the `moe/` prefix; empty when tracking is off.
        expert_load: The full load matrix; None when tracking is off.
        num_updates: Optimizer steps of the call, skipped ones included.
        num_skipped_updates: Optimizer steps that were left out because the loss or the gradient was NaN or infinite.
        skipped_in_a_row: How many of the call's last optimizer steps those are.
    """

    global_loss: float
    grad_norm: float
    lr: float
    num_microbatches: int
    num_tokens: int
    microbatch_metrics: dict[str, MetricSeries]
    moe_metrics: dict[str, float]
    expert_load: ExpertLoad | None = None
    num_updates: int = 1
    num_skipped_updates: int = 0
    skipped_in_a_row: int = 0


@dataclass(frozen=True)
class EvaluationResult:
    """What one `evaluate` call measured: a series for each metric of the loss function."""

    microbatch_metrics: dict[str, MetricSeries]


@dataclass(frozen=True)
class WriteOutcome:
    """How the writing of a checkpoint ended.

    Attributes:
        problem: What went wrong, on whichever rank; None when every rank has written its part.
    """

    problem: str | None


class PolicyInterface(Protocol):
    """The model that an algorithm trains."""

    def train(self, batch: TokenBatch, loss_function: LossFunction) -> TrainResult:
        """One optimizer step for each global batch in `batch`."""
        ...

    def evaluate(self, batch: TokenBatch, loss_function: LossFunction) -> EvaluationResult:
        """Forward passes only; nothing of the model changes."""
        ...

    def logprobs(self, batch: TokenBatch) -> Float[Tensor, "batch sequence"]:
        """Log-probability of each token given those before it, in nats; 0 for the first token and on padding."""
        ...

    def reference_logprobs(self, batch: TokenBatch) -> Float[Tensor, "batch sequence"]:
        """The same of the model at the start of the run, where one is kept."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face names and full tensors of the weights as they are now, for engines that keep a copy."""
        ...

    def save_weights(self, directory: Path) -> Sequence[str]:
        """Writes the weights as a Hugging Face folder; returns the names of parameters that had to be left out."""
        ...

    def start_checkpoint(self, directory: Path, *, with_optimizer: bool) -> None:
        """Takes a snapshot of the training state and begins to write it; training may go on at once.

        Args:
            directory: An existing, empty folder that every rank can reach.
            with_optimizer: Also what only training needs: optimizer, schedule, random states.
        """
        ...

    def poll_checkpoint(self, *, wait: bool) -> WriteOutcome | None:
        """How the writing stands; None while it goes on. With `wait`, comes back when it has ended."""
        ...

    def load_checkpoint(self, directory: Path, *, with_optimizer: bool) -> None:
        """Puts back what `start_checkpoint` wrote, in the same layout or another one."""
        ...

    def shutdown(self) -> None:
        """Stops every worker."""
        ...
