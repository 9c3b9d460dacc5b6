# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What the update of the expert bias did in a step, what captures get of it, and whose load it follows under replay."""

from dataclasses import dataclass
from importlib import import_module
from itertools import count, islice
from typing import Any

import numpy as np
import pytest

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.routing.routers import routers_of
from tests.support.gloo_ranks import run_ranks
from tests.support.quick_list import full
from tests.support.tiny_model import layout, tiny_batch, tiny_grpo_policy
from tests.support.training_run import tiny_trainer
from tests.unit.models.megatron.tiny_trainers import (
    EXPERT_BIAS,
    NUM_EXPERTS,
    NUM_LAYERS,
    UNTRACKED,
    load_counts,
    shard_for,
    with_random_routes,
)

RATE = 0.01
BIAS = {**EXPERT_BIAS, "moe_router_bias_update_rate": RATE}


@dataclass(frozen=True)
class Step:
    """Of one rank: its layers' bias before the last update and now, what the routers hold, the load and the metrics."""

    biases: dict[int, np.ndarray]
    bias: dict[int, np.ndarray]
    load: Any
    metrics: dict[str, float]


def train(policy: Any, steps: list[list[bool]], is_frozen: bool) -> list[Step]:
    """Train on so many global batches in each step; False: one whose loss is no number.

    Where it is frozen, Megatron-Core does not update the bias.
    """
    module: Any = import_module("megatron.core.distributed.finalize_model_grads")
    with tiny_trainer(policy) as trainer, pytest.MonkeyPatch.context() as patch:
        if is_frozen:
            patch.setattr(module, "_update_router_expert_bias", lambda *args, **kwargs: None)
        found, numbers = [], count()
        routers: list[Any] = [pair for chunk in trainer.chunks for pair in routers_of(chunk.decoder)]
        assert trainer.expert_biases() == {}
        for step in steps:
            # Experts of the first half alone.
            batches = [with_random_routes(tiny_batch(n), n, NUM_EXPERTS // 2) for n in islice(numbers, len(step))]
            shards = [shard_for(trainer, batch) for batch in batches]
            scales = iter([1.0 if is_good else float("nan") for is_good in step for _ in shards[0].microbatches])

            def loss(inputs: Any, scales: Any = scales) -> Any:
                outputs = sft_loss(inputs)
                return type(outputs)(outputs.loss * next(scales), outputs.metrics)

            result = trainer.train(shards, loss)
            assert result.num_skipped_updates == step.count(False)
            bias = {
                int(layer.key): router.expert_bias.numpy().copy()
                for layer, router in routers
                if router.expert_bias is not None
            }
            found.append(Step(trainer.expert_biases(), bias, load_counts(result), result.moe_metrics))
        return found


def run(steps: list[list[bool]], world_size: int = 1, is_frozen: bool = False, **changes: Any) -> list[list[Step]]:
    return run_ranks(train, world_size, tiny_grpo_policy(world_size, **{**BIAS, **changes}), steps, is_frozen)


@pytest.mark.parametrize(
    ("world_size", "changes"), [(1, {}), (2, layout(pp=2)), full(2, layout(ep=2)), full(2, layout(tp=2))]
)
def test_metrics_say_how_far_the_bias_has_moved(world_size: int, changes: dict[str, Any]) -> None:
    ranks = run([[True]] * 3, world_size, **changes)
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
    ((step,),) = run([[False]])
    assert step.metrics["expert_bias/max_abs_change"] == step.metrics["expert_bias/max_abs"] == 0


@pytest.mark.parametrize("changes", [{"moe_router_enable_expert_bias": False}, UNTRACKED])
def test_without_a_bias_or_without_tracking_there_are_none(changes: dict[str, Any]) -> None:
    ((step,),) = run([[True]], **changes)
    assert not any(name.startswith("expert_bias") for name in step.metrics)


LAYOUTS = [(1, {}), (2, layout(pp=2)), full(2, layout(pp=2, vpp=2)), full(2, layout(ep=2)), full(2, layout(tp=2))]


@pytest.mark.parametrize(("world_size", "changes"), LAYOUTS)
def test_a_capture_gets_the_bias_before_the_last_update_and_now(world_size: int, changes: dict[str, Any]) -> None:
    is_pipeline = "pipeline_model_parallel_size" in changes
    ranks = run([[True]] * 3, world_size, **changes)
    before = dict.fromkeys(range(NUM_LAYERS), np.zeros(NUM_EXPERTS, dtype=np.float32))
    for steps in zip(*ranks, strict=True):
        assert sum(len(step.biases) for step in steps) == NUM_LAYERS * (1 if is_pipeline else world_size)
        for step in steps:
            assert step.biases.keys() == step.bias.keys(), "every layer of the rank has its own number"
            for layer, (old, new) in step.biases.items():
                np.testing.assert_array_equal(old, before[layer], "as it was, or as the other ranks have it")
                np.testing.assert_array_equal(new, step.bias[layer])
                np.testing.assert_allclose(new - old, towards_even(steps[0].load[layer]), rtol=1e-4)
        before = {layer: step.bias[layer] for step in steps for layer in step.bias}


@pytest.mark.parametrize(("world_size", "changes"), [(1, UNTRACKED), (2, layout(pp=2))])
def test_of_several_updates_it_gets_the_last_and_of_a_skipped_one_nothing(
    world_size: int, changes: dict[str, Any]
) -> None:
    singly = run([[True]] * 3, world_size, **changes)
    together = run([[True, True], [True, False], [False], [False, True]], world_size, **changes)
    for one, several in zip(singly, together, strict=True):
        np.testing.assert_array_equal(_stacked(several[0]), _stacked(one[1]), "of the second update")
        np.testing.assert_array_equal(_stacked(several[0])[:, 0], _stacked(one[0])[:, 1], "which is after the first")
        assert several[1].biases == several[2].biases == {}
        assert several[3].biases.keys() == one[0].biases.keys()
        assert (np.abs(np.diff(_stacked(several[3]), axis=1)).max((1, 2)) > RATE / 2).all()
        assert not any("expert_bias_frozen_layers" in step.metrics for step in several)


def _stacked(step: Step) -> np.ndarray:
    return np.stack([step.biases[layer] for layer in sorted(step.biases)])


@pytest.mark.parametrize(("world_size", "changes"), [(1, {}), (2, layout(pp=2))])
def test_a_bias_that_stands_still_is_the_same_twice_and_without_a_rate_none_is_given(
    world_size: int, changes: dict[str, Any]
) -> None:
    for step, skipped in run([[True, True], [True, False]], world_size, is_frozen=True, **changes):
        assert (np.diff(_stacked(step), axis=1) == 0).all()
        assert step.metrics["expert_bias_frozen_layers"] == NUM_LAYERS
        assert skipped.biases == {}
        assert "expert_bias_frozen_layers" not in skipped.metrics, "of the last update, which says nothing"
    for (step,) in run([[True]], world_size, moe_router_bias_update_rate=0.0, **changes):
        assert step.biases == {}
        assert "expert_bias_frozen_layers" not in step.metrics, "by choice"


def towards_even(load: np.ndarray) -> np.ndarray:
    return RATE * np.sign(load.mean() - load)


def test_under_replay_the_bias_follows_the_load_that_is_asked_for() -> None:
    ((without,),) = run([[True]])
    ((live,),) = run([[True]], routing_replay="rollout", routing_replay_load="live")
    ((replayed,),) = run([[True]], routing_replay="rollout", routing_replay_load="replayed")
    assert replayed.load[:, NUM_EXPERTS // 2 :].sum() < 0.1 * replayed.load.sum(), "the capture names the first half"
    for layer in range(NUM_LAYERS):
        np.testing.assert_allclose(without.bias[layer], towards_even(without.load[layer]), rtol=1e-6)
        np.testing.assert_allclose(replayed.bias[layer], towards_even(replayed.load[layer]), rtol=1e-6)
    # Before the first router nothing depends on routes: it would choose as it does without them.
    np.testing.assert_array_equal(live.bias[0], without.bias[0])
    assert (live.bias[0] != replayed.bias[0]).any()
    np.testing.assert_array_equal(live.load, replayed.load)
