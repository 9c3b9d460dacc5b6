# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Gradients are added up over data-parallel ranks once a step, after its last microbatch."""

from collections import Counter
from dataclasses import dataclass
from functools import wraps
from typing import Any

import pytest

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from tests.support.gloo_ranks import run_ranks
from tests.support.quick_list import full
from tests.support.tiny_model import tiny_policy
from tests.support.training_run import RunSettings, shard_of_step, tiny_trainer
from tests.unit.models.megatron.tiny_trainers import OVERLAP, WITHOUT_LOSSES, ZERO_1

ONE_BY_ONE = tuple((sequence,) for sequence in range(8))
# Auxiliary losses are means over microbatches, of which ranks have different ones.


@dataclass(frozen=True)
class Step:
    """One step: reductions of each bucket group, the microbatches of this rank, and what came out."""

    reductions: tuple[int, ...]
    num_microbatches: int
    loss: float
    grad_norm: float


def train_and_count(settings: RunSettings) -> list[Step]:
    with tiny_trainer(settings.policy, settings.model) as trainer:
        groups = [
            group
            for chunk in trainer.ddp_chunks
            for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)
        ]
        counts: Counter[int] = Counter()
        for number, group in enumerate(groups):
            group.start_grad_sync = _counted(group.start_grad_sync, counts, number)
        steps = []
        for number in range(settings.num_steps):
            counts.clear()
            shard = shard_of_step(trainer, settings, number)
            result = trainer.train([shard], sft_loss)
            reductions = tuple(counts[group] for group in range(len(groups)))
            steps.append(Step(reductions, len(shard.microbatches), result.global_loss, result.grad_norm))
        return steps


def _counted(start_grad_sync: Any, counts: Counter[int], number: int) -> Any:
    @wraps(start_grad_sync)
    def counted(*arguments: Any, **more: Any) -> Any:
        counts[number] += 1
        return start_grad_sync(*arguments, **more)

    return counted


@pytest.mark.parametrize("changes", [{}, full(ZERO_1), ZERO_1 | OVERLAP], ids=["ddp", "zero1", "overlap"])
def test_gradients_are_reduced_once_a_step(changes: dict[str, bool]) -> None:
    """A21: not once a microbatch, which takes as many times the traffic, or adds up what has been added up before."""
    ranks = run_ranks(
        train_and_count, 2, RunSettings(tiny_policy(2, **WITHOUT_LOSSES, **changes), microbatches=ONE_BY_ONE)
    )
    (single,) = run_ranks(
        train_and_count, 1, RunSettings(tiny_policy(1, **WITHOUT_LOSSES), microbatches=(tuple(range(8)),))
    )
    for steps in ranks:
        for step, alone in zip(steps, single, strict=True):
            assert step.num_microbatches == 4
            assert step.reductions
            assert set(step.reductions) == {1}
            assert step.loss == pytest.approx(alone.loss, rel=2e-6)
            assert step.grad_norm == pytest.approx(alone.grad_norm, rel=5e-6)
