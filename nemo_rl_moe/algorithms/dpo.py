# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""DPO: the reference model's log-probabilities of preference pairs, and the training loop."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float
from torch import Tensor

from nemo_rl_moe.algorithms.losses.supervised import PreferenceLoss, response_sums
from nemo_rl_moe.algorithms.sft import SupervisedTraining, keep_as_it_is, num_pairs, train_on_batches
from nemo_rl_moe.algorithms.step_recorder import RunSummary, StepRecorder
from nemo_rl_moe.config.schema import DPOConfig
from nemo_rl_moe.data.loader import GlobalBatchLoader
from nemo_rl_moe.data.preferences import REFERENCE_SUMS, PreferenceDataset, collate_pairs
from nemo_rl_moe.distributed.batch import TokenBatch, per_sequence
from nemo_rl_moe.metrics import PhaseClock

if TYPE_CHECKING:
    from nemo_rl_moe.models.policy.lm_policy import MegatronPolicy

MeasureLogprobs = Callable[[TokenBatch], Float[Tensor, "batch sequence"]]


def add_reference_sums(policy: "MegatronPolicy", batch: TokenBatch, clock: PhaseClock) -> TokenBatch:
    """Return the batch with the column `reference_sums`: the reference model's log-probability of each response.

    The policy computes the log-probabilities with the reference weights that it keeps.

    Args:
        clock: Clock on which the phase `reference_logprobs` is timed.
    """
    with clock.phase("reference_logprobs"):
        sums = _sums(policy.reference_logprobs, batch)
    return batch.with_columns(**{REFERENCE_SUMS: per_sequence(sums)})


def precompute_reference_sums(
    logprobs: MeasureLogprobs,
    dataset: PreferenceDataset,
    batches: Sequence[Sequence[int]],
    pad_token_id: int,
) -> PreferenceDataset:
    """Return the data set with reference sums for the pairs in `batches`, and NaN for the data set's other pairs.

    Args:
        logprobs: Function that returns the log-probabilities of a batch under the initial model: before any training,
            and before a checkpoint is loaded.
        batches: Indices of the pairs in each batch to measure.
    """
    sums = np.full((len(dataset), 2), np.nan)
    for chosen in batches:
        batch = collate_pairs([dataset[index] for index in chosen], pad_token_id)
        sums[list(chosen)] = _sums(logprobs, batch).reshape(-1, 2).numpy()
    return dataset.with_reference_sums(sums)


def batches_to_measure(loader: GlobalBatchLoader, steps: range) -> list[list[int]]:
    """Return batches, as lists of indices, of the pairs whose reference sums the given steps need.

    Each batch has the pairs that one training batch is the first of the run to use. So the batches do not depend on
    the step from which a run resumes, and a resumed run gets bitwise equal numbers.

    Args:
        steps: Range from the number of completed steps to the number of all steps.
    """
    needed = {index for chosen in loader.indices(steps) for index in chosen}
    seen: set[int] = set()
    batches = []
    for chosen in loader.indices(range(steps.stop)):
        first_used = [index for index in chosen if index not in seen]
        seen.update(first_used)
        if not needed.isdisjoint(first_used):
            batches.append(first_used)
    return batches


def _sums(logprobs: MeasureLogprobs, batch: TokenBatch) -> Float[Tensor, " batch"]:
    # The first token has no prediction.
    return response_sums(logprobs(batch)[:, 1:], batch.token_mask[:, 1:])


def train_dpo(
    config: DPOConfig,
    policy: "MegatronPolicy",
    batches: GlobalBatchLoader,
    validation_batches: Callable[[], Iterator[TokenBatch]] | None,
    recorder: StepRecorder,
) -> RunSummary:
    """Train to the last configured step, or until the recorder ends the run.

    Args:
        policy: Trained model. It keeps the reference weights if `reference_logprobs` is `in_step`.
        batches: Batches of pairs. They have reference sums if `reference_logprobs` is `precompute`.
        validation_batches: Function that yields batches of all held-out pairs once, in the same form as `batches`.
    """
    in_step = config.reference_logprobs == "in_step"
    training = SupervisedTraining(
        config,
        policy,
        batches,
        PreferenceLoss(config),
        validation_batches,
        prepare=partial(add_reference_sums, policy) if in_step else keep_as_it_is,
        count_of=num_pairs,
    )
    return train_on_batches(training, recorder)
