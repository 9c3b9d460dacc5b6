# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The interface of losses and training results, without Ray or Megatron-Core."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from nemo_rl_moe.distributed.batch import Axis, Column
from nemo_rl_moe.metrics import MetricSeries, Reduction
from nemo_rl_moe.routing.agreement.statistics import AgreementTotals
from nemo_rl_moe.runs.folder.artifacts import StepArtifacts


class Head(Enum):
    """A quantity of each target token that the model's last stage computes on request of a loss."""

    LOGPROBS = "logprobs"
    """Log-probability of the target given its prefix, in nats."""
    ENTROPY = "entropy"
    """Exact entropy of the target's distribution over the full vocabulary, in nats."""
    VALUE = "value"
    """Value of the state before the target is chosen, such as the expected return. Needs a value head."""
    SCORE = "score"
    """The value head's output at a sequence's last token: the score of a sequence classifier with one label."""
    CANDIDATES = "candidates"
    """Log-probabilities, in nats, of the candidates for the target in the batch's column `candidate_ids`."""


OF_VALUES = frozenset({Head.VALUE, Head.SCORE})
"""Heads that need the value head and no logits."""


@dataclass(frozen=True)
class LossInputs:
    """Inputs of a loss function for one microbatch.

    Attributes:
        logprobs: Log-probability of each token given its prefix, in nats. Entry `t` belongs to target token `t + 1`.
            Has a graph during training. Zeros if the loss needs only values or scores.
        token_mask: True if the target counts in the loss.
        global_valid_tokens: Number of targets that count in the loss, in the global batch on all data-parallel ranks.
        global_sequences: Number of sequences in the global batch with such a target.
        greedy_matches: True if the target has the highest probability. None except during evaluation.
        columns: Further columns for the loss. A column with a value for each token has the shape of `logprobs`.
        entropy: Entropies, if the loss needs `Head.ENTROPY`.
        values: Value of the state in which each target is chosen, if the loss needs `Head.VALUE`. Has a graph during
            training.
        candidates: Log-probabilities of each target's candidates, if the loss needs `Head.CANDIDATES`. Has a graph
            during training.
        scores: Score of each sequence, if the loss needs `Head.SCORE`. Has a graph during training.
    """

    logprobs: Float[Tensor, "sequences targets"]
    token_mask: Bool[Tensor, "sequences targets"]
    global_valid_tokens: int
    global_sequences: int
    greedy_matches: Bool[Tensor, "sequences targets"] | None
    columns: Mapping[str, Column]
    entropy: Float[Tensor, "sequences targets"] | None = None
    values: Float[Tensor, "sequences targets"] | None = None
    candidates: Float[Tensor, "sequences targets k"] | None = None
    scores: Float[Tensor, " sequences"] | None = None

    def per_target(self, name: str) -> Shaped[Tensor, "sequences targets"]:
        """Return a column's value for each target. If a sequence has one value, it is repeated."""
        column = self.columns[name]
        if column.axis is Axis.SEQUENCE:
            return column.values[:, None].expand_as(self.logprobs)
        if column.axis is Axis.TOKEN:
            return column.values
        raise ValueError(f"the column {name} is ragged: it does not have one value for each target")


@dataclass(frozen=True)
class LossOutputs:
    """Outputs of a loss function for one microbatch.

    Attributes:
        loss: Share of the global batch's loss. The shares of all microbatches and ranks *add up* to this loss.
        metrics: Name -> detached scalar, with its reduction over microbatches and ranks.
    """

    loss: Float[Tensor, ""]
    metrics: dict[str, tuple[Tensor, Reduction]]


class LossFunction(Protocol):
    """A pure, picklable function from one microbatch to its share of the loss.

    A loss that needs more than log-probabilities, or only values, lists the `Head`s in an attribute `needs`. A loss
    that is a mean over sequences has an attribute `reduction`, `Reduction.SEQUENCE_SHARE`.
    """

    def __call__(self, inputs: LossInputs) -> LossOutputs: ...


def needs_of(loss_function: LossFunction) -> frozenset[Head]:
    """Return the heads that a loss function declares, and log-probabilities unless it declares only heads of values."""
    declared = frozenset(getattr(loss_function, "needs", ()))
    return declared if declared and declared <= OF_VALUES else declared | {Head.LOGPROBS}


def reduction_of(loss_function: LossFunction) -> Reduction:
    """Return the kind of mean that a loss is. The default is a mean over trained tokens."""
    declared: Reduction = getattr(loss_function, "reduction", Reduction.SHARE)
    return declared


def missing_heads(loss_function: LossFunction, heads: Collection[Head]) -> frozenset[Head]:
    """Return the heads that a loss function needs and a model lacks. Logits also provide entropies and candidates."""
    of_logits = {Head.ENTROPY, Head.CANDIDATES} if Head.LOGPROBS in heads else set()
    return needs_of(loss_function) - {*heads, *of_logits}


@dataclass(frozen=True)
class GpuUse:
    """Use of GPUs in one `train` call.

    Attributes:
        num_gpus: Number of GPUs of the policy.
        train_flops: Number of operations of the forward and backward passes, without padding.
        peak_flops_per_second: Peak of all GPUs of the policy together, or None if it is unknown.
        memory: Metrics of each rank's memory.
    """

    num_gpus: int
    num_gpus_of_run: int
    train_flops: int
    peak_flops_per_second: float | None
    memory: Mapping[str, MetricSeries]


@dataclass(frozen=True)
class TrainResult:
    """Result of one `train` call, equal on every rank.

    Attributes:
        global_loss: Mean over all trained tokens of the call, or over its sequences (`reduction_of`). NaN if there are
            none.
        grad_norm: Mean norm of the gradient before clipping, weighted like the loss.
        microbatch_metrics: A series for each metric of the loss function, over all microbatches and ranks.
        moe_metrics: Name without the `moe/` prefix -> value. Empty if tracking is off.
        num_updates: Number of global batches with a trained token. Other global batches change nothing, and no metric
            counts them.
        num_skipped_updates: Number of optimizer steps that were skipped because of a NaN or infinite loss or gradient.
        skipped_in_a_row: Number of skipped steps at the end of the call.
        weight_version: Number of optimizer steps since the start of the run, without skipped steps.
        artifacts: Registered name -> array or table of the step, such as the load of every expert.
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

    @classmethod
    def of_no_update(cls, weight_version: int) -> "TrainResult":
        """Return the result of a step that has not trained the model. Its loss is NaN."""
        nan = float("nan")
        return cls(nan, nan, nan, 0, 0, {}, {}, num_updates=0, weight_version=weight_version)


@dataclass(frozen=True)
class RouteComparison:
    logprobs: Float[Tensor, "batch sequence"]
    totals: AgreementTotals

    def differences(self, name: str) -> dict[str, float]:
        """Return the shares of rows (a token's experts in one layer) and of tokens whose routes differ.

        The names are `rows_differing_{name}` and `tokens_differing_{name}`. Empty if no row could be compared.
        """
        if not self.totals.tokens[0]:
            return {}
        return {
            f"rows_differing_{name}": self.totals.rows_differing,
            f"tokens_differing_{name}": self.totals.tokens_differing,
        }
