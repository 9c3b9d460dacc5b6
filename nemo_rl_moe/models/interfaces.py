# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The policy and its losses as an algorithm sees them: nothing of Ray, nothing of Megatron-Core."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Protocol

from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from nemo_rl_moe.distributed.batch import Axis, Column, StoredColumn, TokenBatch
from nemo_rl_moe.metrics import MetricSeries, PhaseClock, Reduction
from nemo_rl_moe.moe.tape_ledger import LedgerTotals
from nemo_rl_moe.run_folder.artifacts import StepArtifacts
from nemo_rl_moe.weight_sync.transport import WeightTransport


class Head(Enum):
    """A quantity of each target token that a loss may ask for; the model's last stage computes those asked for."""

    LOGPROBS = "logprobs"
    """Log-probability of the target given the tokens before it, in nats."""
    ENTROPY = "entropy"
    """Entropy of the distribution that the target is drawn from, in nats; exact, over the whole vocabulary."""


@dataclass(frozen=True)
class LossInputs:
    """Inputs of a loss function for one microbatch.

    Attributes:
        logprobs: Log-probability of each token given those before it, in nats; entry `t` belongs to the target
            token `t + 1` of the sequence. Carries the graph during training.
        token_mask: True where that target counts in the loss.
        global_valid_tokens: Number of counting targets in the whole global batch, over all data-parallel ranks.
        global_sequences: Number of sequences with such a target in the whole global batch.
        greedy_matches: True where the target is the token ranked first; only during evaluation.
        columns: The batch's columns for the loss; those on the token axis have rows and columns as `logprobs`.
        entropy: As `logprobs`, where the loss needs `Head.ENTROPY`; None otherwise.
    """

    logprobs: Float[Tensor, "sequences targets"]
    token_mask: Bool[Tensor, "sequences targets"]
    global_valid_tokens: int
    global_sequences: int
    greedy_matches: Bool[Tensor, "sequences targets"] | None
    columns: Mapping[str, Column]
    entropy: Float[Tensor, "sequences targets"] | None = None

    def per_target(self, name: str) -> Shaped[Tensor, "sequences targets"]:
        """Values of a column, one for each target; one of a sequence stands at each of its targets.

        Raises:
            KeyError: There is no such column.
            ValueError: It is ragged.
        """
        column = self.columns[name]
        if column.axis is Axis.SEQUENCE:
            return column.values[:, None].expand_as(self.logprobs)
        if column.axis is Axis.TOKEN:
            return column.values
        raise ValueError(f"the column {name} is ragged: it has no value for each target")


@dataclass(frozen=True)
class LossOutputs:
    """Outputs of a loss function for one microbatch.

    Attributes:
        loss: This microbatch's share of the global batch's loss: the losses of all microbatches of all ranks *add up*
            to it.
        metrics: Name to a detached scalar and its reduction over microbatches and ranks.
    """

    loss: Float[Tensor, ""]
    metrics: dict[str, tuple[Tensor, Reduction]]


class LossFunction(Protocol):
    """A pure function from one microbatch to its share of the loss. Must be picklable: it travels to the workers.

    A loss that needs more than log-probabilities says so in an attribute `needs`, a collection of `Head`.
    """

    def __call__(self, inputs: LossInputs) -> LossOutputs: ...


def needs_of(loss_function: LossFunction) -> frozenset[Head]:
    """Heads that a loss function declares; log-probabilities always."""
    return frozenset({Head.LOGPROBS, *getattr(loss_function, "needs", ())})


@dataclass(frozen=True)
class GpuUse:
    """Use of GPUs in one `train` call.

    Attributes:
        num_gpus: Those that the policy's ranks compute on.
        num_gpus_of_run: Those of generation engines and other roles too.
        train_flops: Operations of the forward and backward passes, by arithmetic over real tokens.
        peak_flops_per_second: What the policy's GPUs together could do in a second; None where it is not known.
        memory: Metrics of each rank's memory.
    """

    num_gpus: int
    num_gpus_of_run: int
    train_flops: int
    peak_flops_per_second: float | None
    memory: Mapping[str, MetricSeries]


@dataclass(frozen=True)
class TrainResult:
    """Result of one `train` call, the same numbers on every rank.

    Attributes:
        global_loss: Loss of the global batch, without auxiliary losses; of several, the mean.
        grad_norm: Norm of the gradient before clipping; of several optimizer steps, the mean.
        lr: Learning rate that the last optimizer step used.
        num_microbatches: Microbatches that each data-parallel rank ran in this call.
        num_tokens: Real tokens (no padding) over all ranks.
        microbatch_metrics: One series for each metric of the loss function, over all microbatches and ranks.
        moe_metrics: MoE metrics without the `moe/` prefix; empty when tracking is off.
        num_updates: Optimizer steps of the call, skipped ones included.
        num_skipped_updates: Optimizer steps that were left out because the loss or the gradient was NaN or infinite.
        skipped_in_a_row: How many of the call's last optimizer steps those are.
        weight_version: Optimizer steps that the weights have seen since the start of the run, skipped ones left out.
        artifacts: Arrays and tables of the step by their registered names, such as the load of every expert.
        gpu_use: Of the policy's GPUs; None on CPUs.
    """

    global_loss: float
    grad_norm: float
    lr: float
    num_microbatches: int
    num_tokens: int
    microbatch_metrics: dict[str, MetricSeries]
    moe_metrics: dict[str, float]
    num_updates: int = 1
    num_skipped_updates: int = 0
    skipped_in_a_row: int = 0
    weight_version: int = 0
    artifacts: StepArtifacts = field(default_factory=dict)
    gpu_use: GpuUse | None = None


@dataclass(frozen=True)
class EvaluationResult:
    """Result of one `evaluate` call: a series for each metric of the loss function."""

    microbatch_metrics: dict[str, MetricSeries]


@dataclass(frozen=True)
class RouteComparison:
    """Comparison of the experts that routers choose with those of a tape.

    Attributes:
        logprobs: Log-probability of each token given those before it, with the chosen experts, in nats.
        totals: The counts.
    """

    logprobs: Float[Tensor, "batch sequence"]
    totals: LedgerTotals

    def differences(self, name: str) -> dict[str, float]:
        """Metrics `rows_differing_{name}` and `tokens_differing_{name}`; empty where no row could be compared."""
        if not self.totals.tokens[0]:
            return {}
        return {
            f"rows_differing_{name}": self.totals.rows_differing,
            f"tokens_differing_{name}": self.totals.tokens_differing,
        }


@dataclass(frozen=True)
class WriteOutcome:
    """Outcome of writing a checkpoint.

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

    def logprobs_and_routes(
        self, batch: TokenBatch, *, one_at_a_time: bool = False
    ) -> tuple[Float[Tensor, "batch sequence"], StoredColumn | None]:
        """`logprobs`, and the routed experts of that pass as a stored column; None of a model without MoE layers.

        Args:
            batch: The sequences.
            one_at_a_time: A sequence a microbatch, whatever the configuration says.
        """
        ...

    def compare_routes(
        self, batch: TokenBatch, *, reference: bool = False, one_at_a_time: bool = False
    ) -> RouteComparison:
        """The experts that routers choose against those of the batch's tape, which is not replayed.

        Args:
            batch: Has a tape; the model has MoE layers.
            reference: Of the model at the start of the run, where one is kept.
            one_at_a_time: A sequence a microbatch, whatever the configuration says.
        """
        ...

    def prepare_for_generation(self, clock: PhaseClock) -> None:
        """Makes room for generation, where the configuration asks for it; what it takes is a phase of the clock."""
        ...

    def prepare_for_logprobs(self, clock: PhaseClock) -> None:
        """The same for log-probability passes."""
        ...

    def prepare_for_training(self, clock: PhaseClock) -> None:
        """Undoes either; `train` does it itself where nobody asked."""
        ...

    def reference_logprobs(self, batch: TokenBatch) -> Float[Tensor, "batch sequence"]:
        """The same of the model at the start of the run, where one is kept."""
        ...

    @property
    def weight_version(self) -> int:
        """Optimizer steps that the weights have seen since the start of the run, skipped ones left out."""
        ...

    def weight_transport(
        self, *, altered: bool = False, then: Callable[[], object] = ...
    ) -> AbstractContextManager[WeightTransport]:
        """A transfer of the weights as they are now to engines that keep a copy; closed when all have them.

        Args:
            altered: Send others in their place, of which every tensor differs: for a check of the engine.
            then: Called when all ranks have been asked to send: what it asks of them, they do next.
        """
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
        """Outcome of the writing; None while it goes on. With `wait`, returns when it has ended."""
        ...

    def load_checkpoint(self, directory: Path, *, with_optimizer: bool) -> None:
        """Puts back what `start_checkpoint` wrote, in the same layout or another one."""
        ...

    def shutdown(self) -> None:
        """Stops every worker."""
        ...
