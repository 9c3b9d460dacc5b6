# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""An algorithm with a critic beside the policy: each step trains the policy on a batch, and the critic on its returns.

It stands for what PPO needs of a run: a role that trains, with a value head, saved and resumed with the policy.
"""

import json
from pathlib import Path

import torch

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.algorithms.losses.value import ValueLoss
from nemo_rl_moe.algorithms.sft import SupervisedTraining, train_on_batches
from nemo_rl_moe.algorithms.step_recorder import num_training_steps
from nemo_rl_moe.checkpoints.fingerprints import TRAINING_DATA, samples_fingerprint
from nemo_rl_moe.config.algorithm import ALGORITHMS, Algorithm
from nemo_rl_moe.config.schema import SFTMasterConfig
from nemo_rl_moe.config.schema_policy import RoleModelConfig
from nemo_rl_moe.data.loader import GlobalBatchLoader, token_ids_and_images
from nemo_rl_moe.data.sft import load_sft_dataset
from nemo_rl_moe.data.tokenizer import pad_token_id
from nemo_rl_moe.distributed.batch import TokenBatch, per_token
from nemo_rl_moe.launch.setup import read_samples
from nemo_rl_moe.launch.training_run import TrainingRun
from nemo_rl_moe.metrics import PhaseClock
from nemo_rl_moe.models.interfaces import Head
from nemo_rl_moe.models.policy.lm_policy import TrainableModel

CRITIC_FILE = "critic.jsonl"
"""In the run's folder: what the critic's updates have come to, a line each."""


class CriticMasterConfig(SFTMasterConfig):
    """Everything that a run of SFT needs, and the critic."""

    critic: RoleModelConfig
    """The model that learns the returns; `cluster.roles.critic` places its workers."""


def with_returns(batch: TokenBatch) -> TokenBatch:
    """Return the batch with a return for each token: a tenth for every trained token that is still to come."""
    remaining = batch.token_mask.flip(1).cumsum(1).flip(1)
    return batch.with_columns(returns=per_token(remaining.float() / 10))


def train_critic(critic: TrainableModel, batch: TokenBatch, file: Path) -> TokenBatch:
    """Return one update of the critic, noted in a file; the batch has its returns and values afterwards."""
    batch = with_returns(batch)
    values = critic.values(batch)
    batch = batch.with_columns(previous_values=per_token(values))
    result = critic.train(batch, ValueLoss(clip_range=0.5))
    line = {
        "loss": result.global_loss,
        "grad_norm": result.grad_norm,
        "version": result.weight_version,
        "value": float(values[:, 1:][batch.token_mask[:, 1:]].mean(dtype=torch.float64)),
        "value_in_loss": result.microbatch_metrics["value_mean"].reduce(),
    }
    with file.open("a") as lines:
        lines.write(f"{json.dumps(line)}\n")
    return batch


def run_critic(config: CriticMasterConfig, run: TrainingRun) -> None:
    """Runs it from start to end."""
    model, critic_model = run.prepare_model(), run.prepare_role("critic")
    training = read_samples(
        load_sft_dataset, config, config.data.train, model.tokenizer, run.console, None, model.speech
    )
    padding = pad_token_id(model.tokenizer)
    loader = GlobalBatchLoader(training, config.policy.train_global_batch_size, padding, config.sft.seed, True)
    fingerprint = samples_fingerprint(config.data.train.path, token_ids_and_images(training))
    run.begin(num_training_steps(config.sft, len(loader)), {TRAINING_DATA: fingerprint})
    policy = run.start_policy()
    critic = run.start_trainable_role("critic", critic_model, heads=[Head.VALUE])
    run.restore()
    recorder = run.open()

    def prepare(batch: TokenBatch, clock: PhaseClock) -> TokenBatch:
        with clock.phase("critic"):
            return train_critic(critic, batch, run.folder / CRITIC_FILE)

    run.end(train_on_batches(SupervisedTraining(config.sft, policy, loader, sft_loss, None, prepare), recorder))


ALGORITHM = Algorithm(
    name="critic",
    summary="supervised fine-tuning of a policy, and of a critic beside it",
    config_class=CriticMasterConfig,
    run=run_critic,
    resume_keys=ALGORITHMS["sft"].resume_keys,
    loop="sft",
    roles=lambda config: {"critic": config.critic},
)
