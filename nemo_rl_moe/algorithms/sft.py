# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning: the shared loop with the negative log-likelihood of the assistant's tokens."""

from collections.abc import Callable, Iterator

from nemo_rl_moe.algorithms.loop import RunSummary
from nemo_rl_moe.algorithms.losses import sft_loss
from nemo_rl_moe.algorithms.run_keeper import RunKeeper
from nemo_rl_moe.algorithms.supervised import EpochBatches, SupervisedTraining, train_on_batches
from nemo_rl_moe.config.schema import SFTConfig
from nemo_rl_moe.distributed.token_batch import TokenBatch
from nemo_rl_moe.models.policy.interfaces import PolicyInterface


def train_sft(
    config: SFTConfig,
    policy: PolicyInterface,
    batches: EpochBatches,
    validation_batches: Callable[[], Iterator[TokenBatch]] | None,
    keeper: RunKeeper,
) -> RunSummary:
    """Trains to the last configured step, or to where the keeper ends the run.

    Args:
        config: The `sft` section.
        policy: What is trained.
        batches: The training batches.
        validation_batches: Makes one pass over the held-out batches; None without validation data.
        keeper: Records each step, saves, and says when to stop.
    """
    return train_on_batches(SupervisedTraining(config, policy, batches, sft_loss, validation_batches), keeper)
