# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Direct preference optimization: the shared loop over pairs of responses, with what a reference model gives them."""

from collections.abc import Callable, Iterator
from functools import partial

from nemo_rl_moe.algorithms.loop import RunSummary
from nemo_rl_moe.algorithms.preference_loss import PreferenceLoss
from nemo_rl_moe.algorithms.reference_sums import measured_in_step, num_pairs
from nemo_rl_moe.algorithms.run_keeper import RunKeeper
from nemo_rl_moe.algorithms.supervised import EpochBatches, SupervisedTraining, keep_as_it_is, train_on_batches
from nemo_rl_moe.config.schema_dpo import DPOConfig
from nemo_rl_moe.distributed.token_batch import TokenBatch
from nemo_rl_moe.models.policy.interfaces import PolicyInterface


def train_dpo(
    config: DPOConfig,
    policy: PolicyInterface,
    batches: EpochBatches,
    validation_batches: Callable[[], Iterator[TokenBatch]] | None,
    keeper: RunKeeper,
) -> RunSummary:
    """Trains to the last configured step, or to where the keeper ends the run.

    Args:
        config: The `dpo` section.
        policy: What is trained; with `reference_logprobs: in_step` it keeps a reference.
        batches: The training batches of pairs; with `reference_logprobs: beforehand` they have their reference sums.
        validation_batches: Makes one pass over the held-out pairs, likewise; None without validation data.
        keeper: Records each step, saves, and says when to stop.
    """
    in_step = config.reference_logprobs == "in_step"
    training = SupervisedTraining(
        config,
        policy,
        batches,
        PreferenceLoss(config),
        validation_batches,
        prepare=partial(measured_in_step, policy) if in_step else keep_as_it_is,
        count_of=num_pairs,
    )
    return train_on_batches(training, keeper)
