# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A few steps of the tiny model from the start or from a checkpoint; what a rank of a test's job runs."""

import os
import resource
import signal
from pathlib import Path
from typing import Any

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.models.megatron.checkpoint.inner_optimizers import optimizer_parts
from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer
from tests.support.tiny_model import parallel_job
from tests.support.training_run import RunSettings, SpoiledLoss, build_trainer, shard_of_step, tiny_trainer

Steps = list[dict[str, Any]]


def train_and_save(settings: RunSettings, folder: str, save_after: int, num_steps: int) -> Steps:
    """Train, and saves into the folder on the way; while that is written, training goes on."""
    with tiny_trainer(settings.policy, settings.model) as trainer:
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
    """Go on from the folder. Begins with other weights and random numbers, which must leave no trace."""
    with tiny_trainer(settings.policy, settings.model) as trainer:
        _train(trainer, settings, 99)
        trainer.load_checkpoint(Path(folder), with_optimizer=with_optimizer)
        return [_train(trainer, settings, step) for step in range(first_step, num_steps)]


def spoil_save_and_train(settings: RunSettings, folder: str, num_steps: int) -> Steps:
    """Save when the first update was left out, before any was done, and goes on."""
    with tiny_trainer(settings.policy, settings.model) as trainer:
        trainer.train([shard_of_step(trainer, settings, 0)], SpoiledLoss("both"))
        trainer.start_checkpoint(Path(folder), with_optimizer=True)
        assert trainer.finish_checkpoint() is None
        return [_train(trainer, settings, step) for step in range(1, num_steps)]


def load_with_a_further_generator(settings: RunSettings, folder: str) -> bool:
    """Return the loads where this rank has a random number generator more than the one that wrote, such as a GPU's.

    Returns:
        Whether the states that the checkpoint has were put back.
    """
    import torch
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    with tiny_trainer(settings.policy, settings.model) as trainer:
        tracker = get_cuda_rng_tracker()
        tracker.set_states(tracker.get_states() | {"of another device": torch.get_rng_state()})
        torch.manual_seed(1234)
        before = torch.get_rng_state()
        trainer.load_checkpoint(Path(folder), with_optimizer=True)
        return not torch.equal(before, torch.get_rng_state())


def adam_steps_after_loading(settings: RunSettings, folder: str) -> tuple[list[float], int, int]:
    """Load, take a step, and say how many updates Adam has counted for each parameter.

    Returns:
        The counts by parameter, how many tensors hold them, and the trainer's own count.
    """
    with tiny_trainer(settings.policy, settings.model) as trainer:
        trainer.load_checkpoint(Path(folder), with_optimizer=True)
        _train(trainer, settings, 0)
        states = [state for part in optimizer_parts(trainer.optimizer) for state in part.optimizer.state.values()]
        counts = [float(state["step"]) for state in states]
        return counts, len({state["step"].data_ptr() for state in states}), trainer.num_updates


def save_once(settings: RunSettings, folder: str, with_optimizer: bool = True) -> str | None:
    """Return one step, then a checkpoint; returns the problem."""
    with tiny_trainer(settings.policy, settings.model) as trainer:
        _train(trainer, settings, 0)
        trainer.start_checkpoint(Path(folder), with_optimizer=with_optimizer)
        return trainer.finish_checkpoint()


def save_and_export(settings: RunSettings, folder: str, exported: str) -> None:
    """Train two steps, then write a checkpoint and Hugging Face's files of the same weights."""
    with tiny_trainer(settings.policy, settings.model) as trainer:
        for step in range(2):
            _train(trainer, settings, step)
        trainer.start_checkpoint(Path(folder), with_optimizer=True)
        assert trainer.finish_checkpoint() is None
        trainer.save_weights(Path(exported), {})


def load_and_export(settings: RunSettings, folder: str, exported: str) -> None:
    """Load a checkpoint over other weights, and write Hugging Face's files."""
    with tiny_trainer(settings.policy, settings.model) as trainer:
        _train(trainer, settings, 99)
        trainer.load_checkpoint(Path(folder), with_optimizer=True)
        trainer.save_weights(Path(exported), {})


def problems_of_saving(settings: RunSettings, folders: list[list[str]], file_limit: int | None = None) -> list[str]:
    """Train a step and saves into each folder in turn, this rank into its own of each list.

    Args:
        settings: What is trained.
        folders: The first is the first rank's, and so on.
        file_limit: Bytes that a file of the last rank may have while it saves into the first folders.

    Returns:
        The problems; "saved" where there is none.
    """
    problems = []
    with parallel_job(settings.policy) as rank:
        trainer = build_trainer(settings.policy, settings.model)
        is_last = rank == len(folders[0]) - 1
        for number, choice in enumerate(folders):
            if file_limit is not None and is_last:
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                limit = file_limit if number == 0 else resource.RLIM_INFINITY
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            trainer.start_checkpoint(Path(choice[rank]), with_optimizer=True)
            _train(trainer, settings, number)
            problems.append(trainer.finish_checkpoint() or "saved")
    return problems


def save_with_an_index_that_cannot_be_written(settings: RunSettings, folder: str) -> str | None:
    """Save with something in the first rank's index that no pickle takes; returns the problem."""
    with parallel_job(settings.policy) as rank:
        trainer = build_trainer(settings.policy, settings.model)
        trainer.start_checkpoint(Path(folder), with_optimizer=True)
        if rank == 0:
            trainer._write._plan.planner_data = lambda: None
        return trainer.finish_checkpoint()


def problem_of_a_rank_s_folder(settings: RunSettings, folders: list[str]) -> str:
    """Load, each rank from its own folder."""
    return problems_of_loading(settings, [folders[int(os.environ["RANK"])]])[0]


def problems_of_loading(settings: RunSettings, folders: list[str], variable: str | None = None) -> list[str]:
    """Return what loading each folder raises: the error's class and text."""
    from nemo_rl_moe.errors import CheckpointError

    if variable is not None:
        os.environ[variable] = "1"
    problems = []
    with tiny_trainer(settings.policy, settings.model) as trainer:
        for folder in folders:
            try:
                trainer.load_checkpoint(Path(folder), with_optimizer=True)
                problems.append("loaded")
            except CheckpointError as error:
                problems.append(str(error))
    return problems


def train_from_weights(settings: RunSettings, folder: str, damaged: str | None) -> tuple[list[str], Steps]:
    """Return two steps with the weights of one folder, and an optimizer that starts anew.

    Args:
        settings: What is trained.
        folder: A checkpoint without the optimizer.
        damaged: One with it, which is tried before; None: nothing is.

    Returns:
        What the damaged one raises, and the steps.
    """
    from nemo_rl_moe.errors import DamagedCheckpointError

    problems: list[str] = []
    with tiny_trainer(settings.policy, settings.model) as trainer:
        if damaged is not None:
            try:
                trainer.load_checkpoint(Path(damaged), with_optimizer=True)
            except DamagedCheckpointError as error:
                problems = error.problems
        trainer.load_checkpoint(Path(folder), with_optimizer=False)
        return problems, [_train(trainer, settings, step) for step in (1, 2)]


def load_weights_alone(settings: RunSettings, folders: list[str]) -> list[str]:
    """Load each folder into a model without an optimizer: the error's text; "loaded" where there is none."""
    from nemo_rl_moe.errors import CheckpointError
    from nemo_rl_moe.models.megatron.checkpoint.load import load_model

    outcomes = []
    with parallel_job(settings.policy):
        chunks = build_trainer(settings.policy, settings.model).chunks
        for folder in folders:
            try:
                load_model(chunks, Path(folder))
                outcomes.append("loaded")
            except CheckpointError as error:
                outcomes.append(str(error))
    return outcomes


def _train(trainer: MegatronTrainer, settings: RunSettings, step: int) -> dict[str, Any]:
    result = trainer.train([shard_of_step(trainer, settings, step)], sft_loss)
    return {"loss": result.global_loss, "grad_norm": result.grad_norm, "lr": result.lr} | result.moe_metrics
