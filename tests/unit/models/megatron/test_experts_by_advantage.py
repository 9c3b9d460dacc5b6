# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Experts by advantage in every layout: replayed routes are known, so that every count follows by hand."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.distributed.batch import TokenBatch, make_shard, per_token
from nemo_rl_moe.routing.metrics.routing_advantage import advantage_metrics, advantage_scores
from nemo_rl_moe.routing.replay import ROUTED_EXPERTS
from tests.support.gloo_ranks import run_ranks
from tests.support.quick_list import listed
from tests.support.tiny_model import layout, tiny_batch
from tests.support.training_run import tiny_trainer
from tests.unit.models.megatron.tiny_trainers import (
    NUM_EXPERTS,
    NUM_LAYERS,
    PACKED,
    UNTRACKED,
    policy_gradient_loss,
    replay_policy,
    with_advantages,
    with_random_routes,
)

# Two updates of a step, in microbatches of different sizes, and sequences that do not lie in their order.
PLANS: dict[int, tuple[Any, ...]] = {
    1: ((((3, 1), (0,)), ((4, 5), (7, 6, 2))),),
    2: ((((3,), (1,)), ((4, 5), (7,))), (((0,), (2,)), ((6,), (8, 9)))),
}


def rl_batch(*, by_token: bool = False) -> TokenBatch:
    """Ten responses to three prompts, one of them left out of the loss, with experts that no router would choose."""
    batch = tiny_batch(3).select([*range(8), 0, 3])
    generator = torch.Generator().manual_seed(7)
    mask = batch.token_mask.clone()
    mask[5] = False
    mask[2, 6] = False  # a token of the environment's, say
    sample_ids = tuple(f"prompts.jsonl:{index % 3}" for index in range(10))
    batch = replace(batch, token_mask=mask, sample_ids=sample_ids)
    batch = with_random_routes(with_advantages(batch, torch.randn(10, generator=generator).tolist()), 7)
    of_tokens = per_token(torch.randn(batch.input_ids.shape, generator=generator))
    return batch.with_columns(advantages=of_tokens) if by_token else batch


def by_hand(batch: TokenBatch, indices: list[int]) -> dict[str, float]:
    """Metrics of some of the sequences, from the routes, token by token."""
    counts, advantages, groups = [], [], []
    for index in indices:
        of_sequence = torch.zeros(NUM_LAYERS, NUM_EXPERTS)
        values = []
        for target in range(1, int(batch.lengths[index])):
            if not batch.token_mask[index, target]:
                continue
            column = batch.columns["advantages"].values
            values.append(float(column[index] if column.ndim == 1 else column[index, target]))
            for layer in range(NUM_LAYERS):
                for expert in batch.columns[ROUTED_EXPERTS].values[index, target - 1, layer].tolist():
                    of_sequence[layer, expert] += 1
        if values:
            counts.append(of_sequence)
            advantages.append(sum(values) / len(values))
            groups.append(index % 3)
    facts = torch.tensor(advantages, dtype=torch.float64), torch.tensor(groups)
    of_counts, of_shares = advantage_scores(torch.stack(counts), *facts)
    metrics = advantage_metrics(of_counts, range(NUM_LAYERS), per_layer=True)
    return metrics | advantage_metrics(of_shares, range(NUM_LAYERS), per_layer=True, of_shares=True)


def train(policy: Any, plan: Any, by_token: bool, loss: str, steps: int) -> dict[str, float]:
    with tiny_trainer(policy) as trainer:
        batch = rl_batch(by_token=by_token)
        if loss == "sft":
            batch = replace(batch, columns={})
        of_rank = plan[trainer.coordinates.data_parallel_rank]
        shards = [make_shard(batch, microbatches, batch) for microbatches in of_rank]
        function = sft_loss if loss == "sft" else policy_gradient_loss()
        for _ in range(steps):
            metrics = trainer.train(shards, function).moe_metrics
        return {name: value for name, value in metrics.items() if name.startswith("routing_advantage/")}


def run(
    world_size: int = 1, *, copies: int = 1, by_token: bool = False, loss: str = "", steps: int = 1, **changes: Any
) -> Any:
    policy = replay_policy(world_size, **changes)
    ranks = run_ranks(train, world_size, policy, PLANS[copies], by_token, loss, steps)
    assert not any(ranks[1:]), "the driver reads the first rank's"
    return ranks[0]


def sequences_of(copies: int) -> list[int]:
    return [index for rank in PLANS[copies] for shard in rank for microbatch in shard for index in microbatch]


LAYOUTS: tuple[tuple[int, int, dict[str, Any]], ...] = (
    (1, 1, {}),
    (1, 1, {"layer_spec": "local", "activation_checkpointing": "full"}),
    (1, 1, PACKED),
    (2, 2, {}),
    (2, 2, layout(ep=2) | {"activation_checkpointing": "moe"}),
    (2, 1, layout(tp=2)),
    (2, 1, layout(tp=2) | PACKED),
    (2, 1, layout(pp=2) | {"activation_checkpointing": "full"}),
    (2, 1, layout(pp=2, vpp=2)),
    (4, 2, layout(pp=2, tp=1)),
    (4, 1, layout(pp=2, tp=2) | PACKED),
)
# One of each kind of layout, and both kinds of advantages; the others prove the same once more.
QUICK = [(*LAYOUTS[0], True), (*LAYOUTS[7], False)]
FULL = [(*LAYOUTS[4], False), (*LAYOUTS[6], True)]


@pytest.mark.parametrize(
    ("world_size", "copies", "changes", "by_token"),
    listed(((*given, by_token) for by_token in (False, True) for given in LAYOUTS), QUICK, FULL),
)
def test_every_layout_counts_what_a_hand_does(
    world_size: int, copies: int, changes: dict[str, Any], by_token: bool
) -> None:
    expected = by_hand(rl_batch(by_token=by_token), sequences_of(copies))
    assert len(expected) == 2 * (2 + 2 * NUM_LAYERS)
    assert run(world_size, copies=copies, by_token=by_token, **changes) == pytest.approx(expected, rel=1e-9)


@pytest.mark.full
def test_the_next_step_starts_anew() -> None:
    assert run(steps=2) == run()


@pytest.mark.parametrize(
    "changes", [{"experts_by_advantage": False}, UNTRACKED, {"loss": "sft", "routing_replay": "none"}]
)
def test_nothing_is_said_where_nothing_is_asked_or_there_are_no_advantages(changes: dict[str, Any]) -> None:
    assert run(**changes) == {}


def test_details_of_layers_are_left_out_without_per_layer_logging() -> None:
    names = {f"routing_advantage/{name}{kind}" for name in ("excess", "max_abs_z") for kind in ("", "_of_shares")}
    assert run(moe_per_layer_logging=False).keys() == names
