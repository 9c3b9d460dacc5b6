# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Routers under adapters: gradients of frozen ones are measured, loads are counted, and replayed routes are taken."""

from typing import Any

import numpy as np
import pytest

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from tests.support.gloo_ranks import run_ranks
from tests.support.lora_models import lora, set_random
from tests.support.quick_list import some_of
from tests.support.tiny_model import layout, shard_of_rank, tiny_batch, tiny_policy
from tests.support.training_run import tiny_trainer
from tests.unit.models.megatron.tiny_trainers import load_counts, replay_policy, shard_for, with_random_routes

MEASURED = {"router_gradients__every_n_steps": 1, "router_gradients__num_microbatches": None}
METRICS = {"moe_z_loss_coeff": 0.01, "layer_spec": "auto", "activation_checkpointing": "none", **MEASURED}


def metrics_of_a_step(policy: Any) -> dict[str, float]:
    """Run on every rank: the MoE metrics of one step on full rows; with adapters that show, where any are."""
    with tiny_trainer(policy) as trainer:
        if policy.lora is not None:
            set_random(trainer.chunks)
        shard = shard_for(trainer, tiny_batch(3, shortest=16, longest=16))
        weights = [parameter.detach().clone() for chunk in trainer.chunks for parameter in chunk.parameters()]
        found = trainer.train([shard], sft_loss).moe_metrics
        after = [parameter for chunk in trainer.chunks for parameter in chunk.parameters()]
        for before, parameter in zip(weights, after, strict=True):
            assert (before == parameter).all() == (not parameter.requires_grad or before.numel() == 0)
            assert parameter.requires_grad or parameter.grad is None
        return {name: value for name, value in found.items() if not name.endswith("seconds")}


@pytest.mark.parametrize("sizes", some_of([{"ep": 2}, {"tp": 2}, {"pp": 2}], 1), ids=str)
def test_gradients_of_frozen_routers_are_the_same_in_every_layout(sizes: dict[str, int]) -> None:
    (expected,) = run_ranks(metrics_of_a_step, 1, tiny_policy(1, **METRICS, **lora("per_expert")))
    found = run_ranks(metrics_of_a_step, 2, tiny_policy(2, **METRICS, **lora("per_expert"), **layout(**sizes)))[0]
    names = [name for name in expected if name.startswith("router_gradient/")]
    assert len(names) > 3
    for name in names:
        np.testing.assert_allclose(found[name], expected[name], rtol=2e-4, atol=1e-6, err_msg=name)


def test_loads_and_gradients_are_those_of_a_trained_model_at_its_start() -> None:
    """Adapters that begin as zero change no route: every metric is that of the same step without them."""
    (plain,) = run_ranks(metrics_of_a_step, 1, tiny_policy(1, **METRICS))
    (adapted,) = run_ranks(metrics_with_zero_adapters, 1, tiny_policy(1, **METRICS, **lora("per_expert")))
    assert adapted.keys() == plain.keys()
    for name, value in plain.items():
        np.testing.assert_allclose(adapted[name], value, rtol=1e-5, atol=1e-7, err_msg=name)


def metrics_with_zero_adapters(policy: Any) -> dict[str, float]:
    """Run on one rank: as `metrics_of_a_step`, of adapters as they begin."""
    with tiny_trainer(policy) as trainer:
        found = trainer.train([shard_of_rank(tiny_batch(3, shortest=16, longest=16))], sft_loss).moe_metrics
        return {name: value for name, value in found.items() if not name.endswith("seconds")}


def replayed(policy: Any) -> tuple[float, dict[str, float], list[Any]]:
    """Run on every rank: a step under replay of random routes, with adapters that show."""
    with tiny_trainer(policy) as trainer:
        set_random(trainer.chunks)
        result = trainer.train([shard_for(trainer, with_random_routes(tiny_batch(3)))], sft_loss)
        return result.global_loss, dict(result.moe_metrics), load_counts(result)


@pytest.mark.parametrize("sizes", some_of([{"ep": 2}, {"tp": 2}, {"pp": 2}], 1), ids=str)
def test_replayed_routes_are_taken_under_adapters(sizes: dict[str, int]) -> None:
    changes = {"layer_spec": "auto", **lora("per_expert")}
    (expected,) = run_ranks(replayed, 1, replay_policy(1, **changes))
    found = run_ranks(replayed, 2, replay_policy(2, **changes, **layout(**sizes)))[0]
    loss, metrics, counts = expected
    assert metrics["routing/rows_usable_share"] == 1
    assert metrics["routing/agreement"] == 1
    assert metrics["routing/live_agreement"] < 0.1, "no router would have chosen them"
    assert found[0] == pytest.approx(loss, rel=1e-6)
    assert found[1]["routing/agreement"] == 1
    np.testing.assert_array_equal(found[2], counts)
