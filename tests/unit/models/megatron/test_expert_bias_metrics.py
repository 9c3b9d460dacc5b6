# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What the update of the expert bias did in a step, and whose load it follows under replay."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.distributed.batch import Destination, TokenBatch, per_token
from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer
from nemo_rl_moe.routing.replay import ROUTED_EXPERTS
from nemo_rl_moe.routing.routers import routers_of
from nemo_rl_moe.runs.folder.artifacts import EXPERT_LOAD
from tests.support.gloo_ranks import run_ranks
from tests.support.tiny_model import layout, parallel_job, shard_of_rank, tiny_batch, tiny_grpo_policy, tiny_hf_config

NUM_LAYERS, NUM_EXPERTS, TOPK = 4, 8, 2
RATE = 0.01
BIAS = {
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_bias_update_rate": RATE,
}


@dataclass(frozen=True)
class Step:
    """Of one rank: the bias of each of its layers, the load of all, and the metrics."""

    bias: dict[int, np.ndarray]
    load: Any
    metrics: dict[str, float]


def batch_with_routes(seed: int) -> TokenBatch:
    """Sequences with experts of the first half alone."""
    batch = tiny_batch(seed)
    generator = torch.Generator().manual_seed(seed)
    shape = (*batch.input_ids.shape, NUM_LAYERS, NUM_EXPERTS // 2)
    routes = torch.rand(shape, generator=generator).topk(TOPK, -1).indices.to(torch.int16)
    fed = torch.arange(batch.input_ids.shape[1]) < (batch.lengths - 1)[:, None]
    routes = routes.where(fed[:, :, None, None], -1)
    return batch.with_columns(**{ROUTED_EXPERTS: per_token(routes, Destination.MODEL, fill=-1)})


def train(policy: Any, num_steps: int, loss_scale: float) -> list[Step]:
    def loss(inputs: Any) -> Any:
        outputs = sft_loss(inputs)
        return type(outputs)(outputs.loss * loss_scale, outputs.metrics)

    with parallel_job(policy):
        trainer = MegatronTrainer(policy, tiny_hf_config(), None, num_steps=10)
        place, steps = trainer.coordinates, []
        routers: list[Any] = [found for chunk in trainer.chunks for found in routers_of(chunk.decoder)]
        for step in range(num_steps):
            shard = shard_of_rank(batch_with_routes(step), place.data_parallel_rank, place.data_parallel_size)
            result = trainer.train([shard], loss)
            bias = {
                int(layer.key): router.expert_bias.numpy().copy()
                for layer, router in routers
                if router.expert_bias is not None
            }
            load = EXPERT_LOAD.of(result.artifacts)
            steps.append(Step(bias, None if load is None else load.counts.numpy(), result.moe_metrics))
        return steps


def run(world_size: int = 1, *, num_steps: int = 1, loss_scale: float = 1.0, **changes: Any) -> list[list[Step]]:
    policy = tiny_grpo_policy(world_size, **{**BIAS, **changes})
    return run_ranks(train, world_size, policy, num_steps, loss_scale)


@pytest.mark.parametrize(
    ("world_size", "changes"),
    [
        (1, {}),
        (2, layout(pp=2)),
        pytest.param(2, layout(ep=2), marks=pytest.mark.full),
        pytest.param(2, layout(tp=2), marks=pytest.mark.full),
    ],
)
def test_metrics_say_how_far_the_bias_has_moved(world_size: int, changes: dict[str, Any]) -> None:
    ranks = run(world_size, num_steps=3, **changes)
    before = {layer: np.zeros(NUM_EXPERTS) for layer in range(NUM_LAYERS)}
    for steps in zip(*ranks, strict=True):
        after = {layer: bias for step in steps for layer, bias in step.bias.items()}
        assert len(after) == NUM_LAYERS
        change = max(float(np.abs(after[layer] - before[layer]).max()) for layer in after)
        largest = max(float(np.abs(bias).max()) for bias in after.values())
        assert change == pytest.approx(RATE, rel=1e-5)
        for step in steps:
            assert step.metrics["expert_bias/max_abs_change"] == pytest.approx(change, rel=1e-6)
            assert step.metrics["expert_bias/max_abs"] == pytest.approx(largest, rel=1e-6)
        before = after


def test_an_update_that_is_left_out_moves_nothing() -> None:
    ((step,),) = run(loss_scale=float("nan"))
    assert step.metrics["expert_bias/max_abs_change"] == step.metrics["expert_bias/max_abs"] == 0


@pytest.mark.parametrize(
    "changes", [{"moe_router_enable_expert_bias": False}, {"track_moe_metrics": False, "moe_per_layer_logging": False}]
)
def test_without_a_bias_or_without_tracking_there_are_none(changes: dict[str, Any]) -> None:
    ((step,),) = run(**changes)
    assert not any(name.startswith("expert_bias") for name in step.metrics)


def towards_even(load: np.ndarray) -> np.ndarray:
    return RATE * np.sign(load.mean() - load)


def test_under_replay_the_bias_follows_the_load_that_is_asked_for() -> None:
    ((without,),) = run()
    ((live,),) = run(routing_replay="rollout", routing_replay_load="live")
    ((replayed,),) = run(routing_replay="rollout", routing_replay_load="replayed")
    assert replayed.load[:, NUM_EXPERTS // 2 :].sum() < 0.1 * replayed.load.sum(), "the capture names the first half"
    for layer in range(NUM_LAYERS):
        np.testing.assert_allclose(without.bias[layer], towards_even(without.load[layer]), rtol=1e-6)
        np.testing.assert_allclose(replayed.bias[layer], towards_even(replayed.load[layer]), rtol=1e-6)
    # Before the first router nothing depends on routes: it would choose as it does without them.
    np.testing.assert_array_equal(live.bias[0], without.bias[0])
    assert (live.bias[0] != replayed.bias[0]).any()
    np.testing.assert_array_equal(live.load, replayed.load)
