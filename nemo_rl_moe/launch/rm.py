# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Entry point of the training of a reward model: makes batches of pairs, then trains a sequence classifier on them."""

from collections.abc import Callable
from functools import partial

from nemo_rl_moe.algorithms.losses.reward import RewardLoss
from nemo_rl_moe.algorithms.sft import SupervisedTraining, num_pairs, train_on_batches
from nemo_rl_moe.algorithms.step_recorder import num_training_steps
from nemo_rl_moe.config.schema import RMMasterConfig
from nemo_rl_moe.data.loader import MakeBatch
from nemo_rl_moe.data.margins import Margins
from nemo_rl_moe.data.preferences import PreferenceDataset, load_preferences
from nemo_rl_moe.data.scored_pairs import collate_scored_pairs
from nemo_rl_moe.launch.pairs import read_pairs
from nemo_rl_moe.launch.setup import PreparedModel
from nemo_rl_moe.launch.training_run import TrainingRun


def reading(config: RMMasterConfig) -> Callable[..., PreferenceDataset]:
    """Return `load_preferences` with the margins of the configuration."""
    return partial(load_preferences, margins=Margins(config.data.margin_key))


def collating(model: PreparedModel) -> MakeBatch:
    """Return a function that makes batches whose sequences end with the token of their score."""
    return partial(collate_scored_pairs, scored_pad_token_id=model.hf_config.pad_token_id)


def run_rm(config: RMMasterConfig, run: TrainingRun) -> None:
    """Train a reward model from start to end."""
    model = run.prepare_model()
    pairs = read_pairs(config, config.rm, model, run.console, reading(config), collating(model))
    run.begin(num_training_steps(config.rm, len(pairs.loader())), pairs.fingerprints(), len(pairs.training))
    if run.is_complete:
        return
    policy = run.start_policy()
    run.restore()
    recorder = run.open()
    training = SupervisedTraining(
        config.rm,
        policy,
        pairs.loader(),
        RewardLoss(config.rm.center_rewards_coefficient),
        pairs.validation_batches(),
        count_of=num_pairs,
    )
    run.end(train_on_batches(training, recorder))
