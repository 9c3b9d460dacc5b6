# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Load of image tokens in every layout: replayed routes are known, so that every count follows by hand."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.distributed.batch import TokenBatch, make_shard
from nemo_rl_moe.models.images import IS_IMAGE
from nemo_rl_moe.routing.metrics.load_statistics import ExpertLoad
from nemo_rl_moe.routing.metrics.modality_metrics import modality_metrics
from nemo_rl_moe.routing.replay import ROUTED_EXPERTS
from nemo_rl_moe.runs.folder.artifacts import EXPERT_LOAD
from tests.support.gloo_ranks import run_ranks
from tests.support.quick_list import full, slow
from tests.support.tiny_model import layout, tiny_batch, with_image_tokens
from tests.support.training_run import tiny_trainer
from tests.unit.models.megatron.tiny_trainers import (
    NUM_EXPERTS,
    NUM_LAYERS,
    PACKED,
    TOPK,
    replay_policy,
    with_random_routes,
)

# Microbatches of different sizes, and sequences that do not lie in their order.
PLANS: dict[int, tuple[Any, ...]] = {1: (((3, 1), (0,), (4, 5), (7, 6, 2)),), 2: (((3,), (1, 5)), ((4, 0), (7, 6, 2)))}


def batch_with_images() -> TokenBatch:
    """Eight sequences, some without an image, with experts that no router would choose."""
    return with_random_routes(with_image_tokens(tiny_batch(3)))


def by_hand(batch: TokenBatch) -> torch.Tensor:
    """Assignments of image tokens, `[layers, experts]`, token by token."""
    counts = torch.zeros(NUM_LAYERS, NUM_EXPERTS, dtype=torch.long)
    routes, is_image = batch.columns[ROUTED_EXPERTS].values, batch.columns[IS_IMAGE].values
    for row, length in enumerate(batch.lengths.tolist()):
        for column in range(length - 1):
            for layer in range(NUM_LAYERS):
                for expert in routes[row, column, layer].tolist():
                    counts[layer, expert] += int(is_image[row, column])
    return counts


def train(policy: Any, plan: Any, with_images: bool, steps: int) -> tuple[ExpertLoad | None, dict[str, float]]:
    with tiny_trainer(policy) as trainer:
        batch = batch_with_images()
        if not with_images:
            batch = replace(batch, columns={ROUTED_EXPERTS: batch.columns[ROUTED_EXPERTS]})
        shard = make_shard(batch, plan[trainer.coordinates.data_parallel_rank], batch)
        for _ in range(steps):
            result = trainer.train([shard], sft_loss)
        return EXPERT_LOAD.of(result.artifacts), result.moe_metrics


def run(
    world_size: int = 1, *, copies: int = 1, with_images: bool = True, steps: int = 1, **changes: Any
) -> tuple[ExpertLoad, dict[str, float]]:
    policy = replay_policy(world_size, **changes)
    found: Any = run_ranks(train, world_size, policy, PLANS[copies], with_images, steps)
    return found[0]


# One of each kind of layout is not slow; the others prove the same once more.
@pytest.mark.parametrize(
    ("world_size", "copies", "changes"),
    [
        full(1, 1, {}),
        slow(1, 1, {"layer_spec": "local", "activation_checkpointing": "full"}),
        (1, 1, PACKED),
        slow(2, 2, {}),
        (2, 2, layout(ep=2) | {"activation_checkpointing": "moe"}),
        slow(2, 2, layout(ep=2) | PACKED),
        full(2, 1, layout(tp=2)),
        slow(2, 1, layout(tp=2) | PACKED),
        slow(2, 1, layout(pp=2) | {"activation_checkpointing": "full"}),
        full(2, 1, layout(pp=2, vpp=2) | PACKED),
        slow(4, 2, layout(pp=2, tp=1)),
        slow(4, 1, layout(pp=2, tp=2) | PACKED),
    ],
)
def test_every_layout_counts_what_a_hand_does(world_size: int, copies: int, changes: dict[str, Any]) -> None:
    load, _ = run(world_size, copies=copies, **changes)
    expected = by_hand(batch_with_images())
    assert load.image_counts is not None
    assert torch.equal(load.image_counts, expected)
    assert load.topk == TOPK
    assert torch.equal(load.counts.sum(1), torch.full((NUM_LAYERS,), TOPK * int(batch_with_images().lengths.sum())))
    assert (load.image_counts <= load.counts).all()


def test_the_next_step_starts_anew() -> None:
    found = run(steps=2)[0].image_counts
    assert found is not None
    assert torch.equal(found, by_hand(batch_with_images()))


def test_numbers_of_a_step_are_those_of_its_counts() -> None:
    load, metrics = run(moe_metrics__mode="detailed")
    found = {key: value for key, value in metrics.items() if "image" in key or "text" in key or "modality" in key}
    assert found == modality_metrics(load, detailed=True)
    assert len(found) == 1 + 2 * 3 + 3 + NUM_LAYERS * (2 * 3 + 2)


def test_a_batch_without_the_column_costs_and_says_nothing() -> None:
    load, metrics = run(with_images=False)
    assert load.image_counts is None
    assert not any("image" in key or "text" in key or "modality" in key for key in metrics)
