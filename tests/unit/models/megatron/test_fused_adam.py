# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Where Megatron-Core falls back to torch's AdamW, its fused form is used, and means the same."""

from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from tests.support.gloo_ranks import run_ranks
from tests.support.quick_list import full
from tests.support.tiny_model import parallel_job, tiny_policy
from tests.support.training_run import RunSettings, build_trainer, shard_of_step, tiny_trainer
from tests.unit.models.megatron.tiny_trainers import ZERO_1


def optimizers_of(trainer: Any) -> list[torch.optim.AdamW]:
    """Torch's optimizers, inside Megatron-Core's."""
    return [part.optimizer for part in trainer.optimizer.chained_optimizers]


def train_with(settings: RunSettings, fused: bool) -> tuple[list[bool], list[Tensor]]:
    """Return whether each group is fused as built, and the weights after three steps with `fused`."""
    with tiny_trainer(settings.policy, settings.model) as trainer:
        groups = [group for optimizer in optimizers_of(trainer) for group in optimizer.param_groups]
        as_built = [group["fused"] is True for group in groups]
        for group in groups:
            group["fused"] = fused
        for step in range(3):
            trainer.train([shard_of_step(trainer, settings, step)], sft_loss)
        return as_built, [weight.detach().clone() for chunk in trainer.chunks for weight in chunk.parameters()]


def train_both(settings: RunSettings) -> tuple[list[bool], float, float]:
    """Return whether each group is fused as built, the largest difference of a weight, and how far weights moved."""
    as_built, fused = train_with(settings, True)
    _, unfused = train_with(settings, False)
    with parallel_job(settings.policy):
        started = [
            weight.detach()
            for chunk in build_trainer(settings.policy, settings.model).chunks
            for weight in chunk.parameters()
        ]
        return as_built, _largest_difference(fused, unfused), _largest_difference(started, fused)


def _largest_difference(left: list[Tensor], right: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("changes", [full({}), ZERO_1], ids=["replicated", "distributed"])
def test_adam_is_fused_and_trains_the_same(changes: dict[str, Any]) -> None:
    settings = RunSettings(tiny_policy(**changes))
    ((as_built, difference, moved),) = run_ranks(train_both, 1, settings)
    assert len(as_built) >= 3
    assert all(as_built)
    assert difference < 1e-6
    assert moved > 1e-3
