# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Training loop over batches of given samples, for supervised fine-tuning and preference optimization."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.algorithms.step_metrics import training_metrics, validation_metrics
from nemo_rl_moe.algorithms.step_recorder import (
    RunSummary,
    StepOutcome,
    StepRecorder,
    num_training_steps,
    validation_is_due,
)
from nemo_rl_moe.config.schema import SFTConfig
from nemo_rl_moe.config.schema_base import SupervisedLoopConfig
from nemo_rl_moe.data.loader import GlobalBatchLoader
from nemo_rl_moe.distributed.batch import TokenBatch
from nemo_rl_moe.metrics import PhaseClock
from nemo_rl_moe.models.interfaces import LossFunction

if TYPE_CHECKING:
    from nemo_rl_moe.models.policy.lm_policy import MegatronPolicy


def keep_as_it_is(batch: TokenBatch, clock: PhaseClock) -> TokenBatch:
    """Return the batch unchanged, for algorithms whose loss needs no further columns."""
    return batch


def num_pairs(batch: TokenBatch) -> int:
    """Return the number of pairs of a batch. It is the weight of the batch in a mean over pairs."""
    return len(batch) // 2


@dataclass(frozen=True)
class SupervisedTraining:
    """Inputs of a supervised training loop.

    Attributes:
        prepare: Function that returns a batch with further columns for the loss. It times its phases on the clock.
        count_of: Function that returns a batch's weight in the means of a validation, such as its number of tokens or
            pairs.
    """

    schedule: SupervisedLoopConfig
    policy: "MegatronPolicy"
    batches: GlobalBatchLoader
    loss_function: LossFunction
    validation_batches: Callable[[], Iterator[TokenBatch]] | None
    prepare: Callable[[TokenBatch, PhaseClock], TokenBatch] = keep_as_it_is
    count_of: Callable[[TokenBatch], int] = TokenBatch.num_valid_tokens


def train_on_batches(training: SupervisedTraining, recorder: StepRecorder) -> RunSummary:
    """Train from the run's current step to the last one, validate when due, and end each step with the recorder."""
    num_steps = num_training_steps(training.schedule, len(training.batches))
    validates = training.validation_batches is not None
    if recorder.is_fresh and validates and training.schedule.val_at_start:
        recorder.record_start(run_validation(training))
    for step, batch in _numbered_batches(training.batches, recorder.state.step, num_steps):
        clock = PhaseClock()
        with clock.phase("step"):
            batch = training.prepare(batch, clock)
            with clock.phase("train"):
                result = training.policy.train(batch, training.loss_function)
        clock.count_tokens("train", result.num_tokens)
        is_due = validates and validation_is_due(training.schedule, step, num_steps)
        outcome = StepOutcome(
            batches_taken=step,
            result=result,
            training=training_metrics(result),
            validation=run_validation(training) if is_due else {},
            sample_ids=batch.sample_ids,
        )
        if not recorder.end_step(outcome, clock, is_last=step == num_steps):
            break
    recorder.finish()
    return RunSummary.of(recorder.state, recorder.stopped_for)


def run_validation(training: SupervisedTraining) -> dict[str, float]:
    """Return the loss function's means over all held-out batches, weighted by `count_of`."""
    assert training.validation_batches is not None
    clock, inner_clock = PhaseClock(), PhaseClock()
    totals: dict[str, float] = {}
    total_count = 0
    with clock.phase("validation"):
        for batch in training.validation_batches():
            prepared = training.prepare(batch, inner_clock)
            count = training.count_of(prepared)
            total_count += count
            measured = validation_metrics(training.policy.evaluate(prepared, training.loss_function))
            for name, value in measured.items():
                if not name.startswith("val/num_"):  # a mean of counts makes no sense
                    totals[name] = totals.get(name, 0.0) + value * count
    return {name: total / total_count for name, total in totals.items()} | clock.metrics()


def _numbered_batches(batches: GlobalBatchLoader, steps_done: int, num_steps: int) -> Iterator[tuple[int, TokenBatch]]:
    """Yield the number (counted from 1) and the batch of each remaining step."""
    step = steps_done
    while step < num_steps:
        epoch, first = divmod(step, len(batches))
        for batch in batches.epoch(epoch, first):
            step += 1
            yield step, batch
            if step == num_steps:
                return


def train_sft(
    config: SFTConfig,
    policy: "MegatronPolicy",
    batches: GlobalBatchLoader,
    validation_batches: Callable[[], Iterator[TokenBatch]] | None,
    recorder: StepRecorder,
) -> RunSummary:
    """Train to the last configured step, or until the recorder ends the run."""
    return train_on_batches(SupervisedTraining(config, policy, batches, sft_loss, validation_batches), recorder)
