# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Experts by writer in layouts: replayed routes are known, so that every count follows by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from nemo_rl_moe.distributed.batch import TokenBatch, make_shard, per_token
from nemo_rl_moe.routing.metrics.writers import writer_metrics
from nemo_rl_moe.routing.replay import ROUTED_EXPERTS
from nemo_rl_moe.runs.folder.artifacts import EXPERTS_BY_WRITER
from nemo_rl_moe.token_writers import TOKEN_WRITERS, WRITERS
from tests.support.gloo_ranks import run_ranks
from tests.support.tiny_model import layout
from tests.support.training_run import tiny_trainer
from tests.unit.models.megatron.test_experts_by_advantage import PLANS, rl_batch, sequences_of
from tests.unit.models.megatron.tiny_trainers import (
    NUM_EXPERTS,
    NUM_LAYERS,
    PACKED,
    policy_gradient_loss,
    replay_policy,
)


def conversations() -> TokenBatch:
    """Sequences whose tokens have changing writers, and known experts; those of a last token are the router's own."""
    batch = rl_batch()
    writers = (torch.arange(batch.input_ids.numel()) * 7 // 3 % len(WRITERS)).view(batch.input_ids.shape)
    routes = batch.columns[ROUTED_EXPERTS]
    is_token = torch.arange(writers.shape[1]) < batch.lengths[:, None]
    known = torch.where(is_token[:, :, None, None], routes.values.clamp(min=0), -1)
    # Two experts that differ where a last token had none.
    known[..., 1] = torch.where(known[..., 1] == known[..., 0], (known[..., 0] + 1) % NUM_EXPERTS, known[..., 1])
    known = torch.where(is_token[:, :, None, None], known, -1)
    return batch.with_columns(
        **{TOKEN_WRITERS: per_token(writers.to(torch.int8)), ROUTED_EXPERTS: replace(routes, values=known)}
    )


def by_hand(batch: TokenBatch, indices: list[int]) -> np.ndarray:
    counts = np.zeros((len(WRITERS), NUM_LAYERS, NUM_EXPERTS), dtype=np.int64)
    for index in indices:
        for place in range(int(batch.lengths[index])):
            writer = int(batch.columns[TOKEN_WRITERS].values[index, place])
            for layer in range(NUM_LAYERS):
                for expert in batch.columns[ROUTED_EXPERTS].values[index, place, layer].tolist():
                    counts[writer, layer, expert] += 1
    return counts


def train(policy: Any, plan: Any, has_writers: bool) -> Any:
    with tiny_trainer(policy) as trainer:
        batch = conversations()
        if not has_writers:
            batch = replace(batch, columns={k: v for k, v in batch.columns.items() if k != TOKEN_WRITERS})
        of_rank = plan[trainer.coordinates.data_parallel_rank]
        shards = [make_shard(batch, microbatches, batch) for microbatches in of_rank]
        for _ in range(2):  # the second step begins anew
            found = trainer.train(shards, policy_gradient_loss())
        metrics = {name: value for name, value in found.moe_metrics.items() if name.startswith("routing_writers/")}
        load = EXPERTS_BY_WRITER.of(found.artifacts)
        return metrics, None if load is None else load.counts


def run(world_size: int = 1, copies: int = 1, *, has_writers: bool = True, **changes: Any) -> Any:
    ranks = run_ranks(train, world_size, replay_policy(world_size, **changes), PLANS[copies], has_writers)
    assert all(rank == ({}, None) for rank in ranks[1:]), "the driver reads the first rank's"
    return ranks[0]


@pytest.mark.parametrize(
    ("world_size", "copies", "changes"),
    [
        (1, 1, {}),
        pytest.param(1, 1, PACKED, marks=pytest.mark.full),
        pytest.param(2, 2, layout(ep=2) | {"activation_checkpointing": "moe"}, marks=pytest.mark.full),
        pytest.param(2, 1, layout(tp=2) | PACKED, marks=pytest.mark.full),
        (2, 1, layout(pp=2)),
    ],
)
def test_layouts_count_what_a_hand_does(world_size: int, copies: int, changes: dict[str, Any]) -> None:
    expected = by_hand(conversations(), sequences_of(copies))
    metrics, counts = run(world_size, copies, **changes)
    np.testing.assert_array_equal(counts, expected)
    assert metrics == pytest.approx(writer_metrics(expected, range(NUM_LAYERS), per_layer=True))
    assert len(metrics) == 2 * (1 + NUM_LAYERS)


@pytest.mark.parametrize("changes", [{"has_writers": False}, {"experts_by_writer": False}])
def test_nothing_is_said_where_nothing_is_asked_or_no_environment_wrote(changes: dict[str, Any]) -> None:
    assert run(**changes) == ({}, None)
