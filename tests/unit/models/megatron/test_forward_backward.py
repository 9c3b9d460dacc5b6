# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What must not change the training: the size of a microbatch, packing, tracking, evaluation."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.distributed.batch import make_shard
from nemo_rl_moe.metrics import Reduction
from nemo_rl_moe.models.megatron.model.releases import recorded_auxiliary_losses
from nemo_rl_moe.models.megatron.training.forward_backward import metrics_to_host
from tests.support.gloo_ranks import run_ranks
from tests.support.quick_list import slow
from tests.support.tiny_model import layout, tiny_batch, tiny_policy
from tests.support.training_run import RankRun, RunSettings, difference, shard_of_step, tiny_trainer, train_run
from tests.unit.models.megatron.tiny_trainers import WITHOUT_LOSSES


def blocks(size: int) -> tuple[tuple[int, ...], ...]:
    """Eight sequences in microbatches of one size."""
    return tuple(tuple(range(start, start + size)) for start in range(0, 8, size))


def packed(policy: PolicyConfig) -> PolicyConfig:
    packing = policy.sequence_packing.model_copy(update={"enabled": True})
    return policy.model_copy(update={"sequence_packing": packing})


@pytest.mark.parametrize("layer_spec", [slow("local"), "auto"])
def test_microbatch_size_changes_nothing(layer_spec: str) -> None:
    # Without auxiliary losses: those are means over microbatches by definition.
    policy = tiny_policy(1, layer_spec=layer_spec, **WITHOUT_LOSSES)
    runs = [run_ranks(train_run, 1, RunSettings(policy, microbatches=blocks(size)))[0] for size in (1, 2, 4)]
    _assert_same(runs, runs[0])


@pytest.mark.parametrize("microbatches", [*(slow(blocks(size)) for size in (1, 4)), ((0,), (1, 2, 3), (4, 5, 6, 7))])
def test_packing_changes_nothing(microbatches: Sequence[Sequence[int]]) -> None:
    policy = tiny_policy(1, layer_spec="auto")
    (padded_run,) = run_ranks(train_run, 1, RunSettings(policy, microbatches=microbatches))
    (packed_run,) = run_ranks(train_run, 1, RunSettings(packed(policy), microbatches=microbatches))
    _assert_same([packed_run], padded_run)


def _assert_same(runs: Sequence[RankRun], reference: RankRun) -> None:
    for run in runs:
        found = difference([run], reference)
        assert found.loss < 5e-7
        assert found.grad_norm < 2e-6
        assert found.weights < 5e-6


def evaluate_between_steps(settings: RunSettings) -> dict[str, Any]:
    with tiny_trainer(settings.policy, settings.model) as trainer:
        shard = shard_of_step(trainer, settings, 0)
        first = trainer.train([shard], sft_loss)
        before = [parameter.detach().clone() for chunk in trainer.chunks for parameter in chunk.parameters()]
        evaluated = trainer.evaluate(shard, sft_loss)
        after = [parameter for chunk in trainer.chunks for parameter in chunk.parameters()]
        same = all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
        recorded = sum(values.abs().sum().item() for values in recorded_auxiliary_losses().values())
        second = trainer.train([shard_of_step(trainer, settings, 1)], sft_loss)
        return {
            "same": same,
            "recorded": recorded,
            "losses": [first.global_loss, second.global_loss],
            "norms": [first.grad_norm, second.grad_norm],
            "metrics": [first.moe_metrics, second.moe_metrics],
            "evaluated": {name: series.reduce() for name, series in evaluated.items()},
            "microbatches": first.num_microbatches,
        }


@pytest.mark.full
@pytest.mark.parametrize("checkpointing", [slow("none"), "full"])
def test_evaluation_leaves_nothing_behind(checkpointing: str) -> None:
    policy = tiny_policy(1, layer_spec="local", activation_checkpointing=checkpointing)
    settings = RunSettings(policy, num_steps=2)
    (answer,) = run_ranks(evaluate_between_steps, 1, settings)
    (undisturbed,) = run_ranks(train_run, 1, settings)
    assert answer["same"]
    assert answer["recorded"] == 0.0
    assert answer["losses"] == undisturbed.losses
    assert answer["norms"] == undisturbed.grad_norms
    assert answer["metrics"] == undisturbed.moe_metrics
    assert answer["microbatches"] == 4
    assert answer["evaluated"]["loss"] < answer["losses"][0]
    assert answer["evaluated"]["num_valid_tokens"] == tiny_batch(100).num_valid_tokens()
    assert 0.0 <= answer["evaluated"]["accuracy"] <= 1.0


@pytest.mark.full
def test_evaluation_agrees_over_layouts() -> None:
    (single,) = run_ranks(evaluate_between_steps, 1, RunSettings(tiny_policy(1, layer_spec="auto")))
    settings = RunSettings(tiny_policy(4, layer_spec="auto", **layout(tp=2, pp=2)))
    ranks = run_ranks(evaluate_between_steps, 4, settings)
    assert [bool(rank["evaluated"]) for rank in ranks] == [False, False, True, False]
    assert ranks[2]["evaluated"] == pytest.approx(single["evaluated"], rel=1e-6)


def two_steps_in_one_call(policy: PolicyConfig, together: bool) -> tuple[list[float], list[float], int]:
    with tiny_trainer(policy) as trainer:
        shards = [shard_of_step(trainer, RunSettings(policy), step) for step in range(2)]
        calls = [shards] if together else [[shard] for shard in shards]
        results = [trainer.train(call, sft_loss) for call in calls]
        last = [result.moe_metrics["load_balancing_loss"] for result in results]
        return [result.global_loss for result in results], last, results[-1].num_microbatches


def test_several_optimizer_steps_in_one_call_are_averaged() -> None:
    policy = tiny_policy(1, layer_spec="auto")
    ((losses, balance, count),) = run_ranks(two_steps_in_one_call, 1, policy, True)
    ((single_losses, single_balance, single_count),) = run_ranks(two_steps_in_one_call, 1, policy, False)
    assert (count, single_count) == (8, 4)
    batches = [tiny_batch(100 + step) for step in range(2)]
    trained = [batch.num_valid_tokens() for batch in batches]
    assert losses[0] == pytest.approx(np.average(single_losses, weights=trained), rel=1e-6)
    # Routers see prompts too.
    seen = [int(batch.lengths.sum()) for batch in batches]
    assert balance[0] == pytest.approx(np.average(single_balance, weights=seen), rel=1e-6)


def frozen_and_trained(settings: RunSettings) -> list[str]:
    with tiny_trainer(settings.policy, settings.model) as trainer:
        parameters = dict(trainer.chunks[0].named_parameters())
        before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        trainer.train([shard_of_step(trainer, settings, 0)], sft_loss)
        return [name for name, parameter in parameters.items() if torch.equal(parameter, before[name])]


def test_frozen_routers_stay_and_all_else_trains() -> None:
    policy = tiny_policy(1, layer_spec="local", freeze_moe_router=True)
    (unchanged,) = run_ranks(frozen_and_trained, 1, RunSettings(policy))
    assert unchanged == [f"decoder.layers.{layer}.mlp.router.weight" for layer in range(4)]
    (unchanged,) = run_ranks(frozen_and_trained, 1, RunSettings(tiny_policy(1, layer_spec="local")))
    assert unchanged == []


@pytest.mark.full
@pytest.mark.parametrize("layer_spec", [slow("local"), "auto"])
def test_bfloat16_stays_close_to_float32(layer_spec: str) -> None:
    (exact,) = run_ranks(train_run, 1, RunSettings(tiny_policy(1, layer_spec=layer_spec)))
    (rounded,) = run_ranks(train_run, 1, RunSettings(tiny_policy(1, layer_spec=layer_spec, precision="bfloat16")))
    assert rounded.losses == pytest.approx(exact.losses, rel=1e-2)
    assert rounded.grad_norms == pytest.approx(exact.grad_norms, rel=0.1)
    assert rounded.losses != exact.losses


def test_metrics_come_to_the_host_by_name() -> None:
    results = [
        {"loss": (torch.tensor(value), Reduction.SUM), "tokens": (torch.tensor(count), Reduction.MAX)}
        for value, count in ((0.5, 3), (0.25, 4))
    ]
    assert metrics_to_host(results) == {"loss": ([0.5, 0.25], Reduction.SUM), "tokens": ([3.0, 4.0], Reduction.MAX)}
    assert metrics_to_host([]) == {}


def test_shard_counts_the_whole_global_batch() -> None:
    batch = tiny_batch(1)
    shard = make_shard(batch, [(0, 1), (2, 3)], batch)
    assert [len(microbatch) for microbatch in shard.microbatches] == [2, 2]
    assert shard.global_valid_tokens == int((batch.lengths - 3).sum())
    assert shard.global_sequences == 8
