# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A few steps of the tiny model from the start or from a checkpoint; what a rank of a test's job runs."""

import os
from pathlib import Path
from typing import Any

from nemo_rl_moe.algorithms.losses import sft_loss
from nemo_rl_moe.models.megatron.checkpoint.optimizer_state import optimizer_parts
from nemo_rl_moe.models.megatron.trainer import MegatronTrainer
from tests.support.tiny_model import parallel_job
from tests.support.training_run import RunSettings, build_trainer, shard_of_step

Steps = list[dict[str, Any]]


def train_and_save(settings: RunSettings, folder: str, save_after: int, num_steps: int) -> Steps:
    """Trains, and saves into the folder on the way; while that is written, training goes on."""
    with parallel_job(settings.policy):
        trainer = build_trainer(settings)
        steps = []
        for step in range(num_steps):
            if step == save_after:
                trainer.start_checkpoint(Path(folder), with_optimizer=True)
            steps.append(_train(trainer, settings, step))
            if step == save_after:
                assert trainer.finish_checkpoint() is None
        return steps


def load_and_train(
    settings: RunSettings, folder: str, first_step: int, num_steps: int, with_optimizer: bool = True
) -> Steps:
    """Goes on from the folder. Begins with other weights and random numbers, which must leave no trace."""
    with parallel_job(settings.policy):
        trainer = build_trainer(settings)
        _train(trainer, settings, 99)
        trainer.load_checkpoint(Path(folder), with_optimizer=with_optimizer)
        return [_train(trainer, settings, step) for step in range(first_step, num_steps)]


def adam_steps_after_loading(settings: RunSettings, folder: str) -> tuple[list[float], int, int]:
    """Loads, takes a step, and tells how many updates Adam has counted for each parameter.

    Returns:
        The counts by parameter, how many tensors hold them, and the trainer's own count.
    """
    with parallel_job(settings.policy):
        trainer = build_trainer(settings)
        trainer.load_checkpoint(Path(folder), with_optimizer=True)
        _train(trainer, settings, 0)
        states = [state for part in optimizer_parts(trainer.optimizer) for state in part.optimizer.state.values()]
        counts = [float(state["step"]) for state in states]
        return counts, len({state["step"].data_ptr() for state in states}), trainer.num_updates


def save_once(settings: RunSettings, folder: str, with_optimizer: bool = True) -> str | None:
    """One step, then a checkpoint; returns the problem."""
    with parallel_job(settings.policy):
        trainer = build_trainer(settings)
        _train(trainer, settings, 0)
        trainer.start_checkpoint(Path(folder), with_optimizer=with_optimizer)
        return trainer.finish_checkpoint()


def problems_of_loading(settings: RunSettings, folders: list[str], variable: str | None = None) -> list[str]:
    """What loading each folder raises: the error's class and text."""
    from nemo_rl_moe.errors import CheckpointError

    if variable is not None:
        os.environ[variable] = "1"
    problems = []
    with parallel_job(settings.policy):
        trainer = build_trainer(settings)
        for folder in folders:
            try:
                trainer.load_checkpoint(Path(folder), with_optimizer=True)
                problems.append("loaded")
            except CheckpointError as error:
                problems.append(str(error))
    return problems


def _train(trainer: MegatronTrainer, settings: RunSettings, step: int) -> dict[str, Any]:
    result = trainer.train([shard_of_step(trainer, settings, step)], sft_loss)
    return {"loss": result.global_loss, "grad_norm": result.grad_norm, "lr": result.lr} | result.moe_metrics
