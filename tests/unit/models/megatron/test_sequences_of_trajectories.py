# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Trajectories of several sequences in training: empty rows change nothing, a turn of two sequences counts once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from nemo_rl_moe.config.schema_grpo import GeneratingPolicyConfig
from nemo_rl_moe.distributed.batch import make_shard, with_empty_rows
from nemo_rl_moe.distributed.microbatches import plan_microbatches
from nemo_rl_moe.metrics import MetricSeries
from nemo_rl_moe.models.policy.model_workers import choose_batching, join_metrics
from nemo_rl_moe.rollouts.training_batch import training_batch
from nemo_rl_moe.rollouts.trajectory import TokenSequence, Trajectory
from tests.support.gloo_ranks import run_ranks
from tests.support.grpo_fakes import trajectory
from tests.support.grpo_inputs import tokens_of, with_tokens
from tests.support.quick_list import full
from tests.support.tiny_model import tiny_grpo_policy
from tests.support.training_run import tiny_trainer
from tests.unit.models.megatron.tiny_trainers import load_counts, policy_gradient_loss

ADVANTAGES = torch.tensor([[1.0, -0.5], [0.25, -1.5]])
# A balancing loss is one of a microbatch, and so depends on the cut.
SETTINGS = {"train_micro_batch_size": 1, "train_global_batch_size": 4, "moe_aux_loss_coeff": 0.0}
PACKED = {
    "sequence_packing__enabled": True,
    "sequence_packing__train_mb_tokens": 19,
    "max_total_sequence_length": 19,
    "generation__max_new_tokens": 8,
}


@dataclass(frozen=True)
class Step:
    """Results of an optimizer step on one rank."""

    loss: float
    grad_norm: float
    num_microbatches: int
    series: dict[str, MetricSeries]
    experts: np.ndarray[Any, Any] | None
    weights: dict[str, np.ndarray[Any, Any]]


def step_of(policy: GeneratingPolicyConfig, trajectories: Sequence[Trajectory]) -> Step:
    with tiny_trainer(policy) as trainer:
        place = trainer.coordinates
        batch = training_batch(trajectories, ADVANTAGES, 0, leave_out_truncated=False)
        plan = plan_microbatches(
            batch.lengths.tolist(),
            num_data_parallel_ranks=place.data_parallel_size,
            global_batch_size=len(trajectories),
            batching=choose_batching(policy, policy.train_micro_batch_size),
            sample_sizes=batch.sample_sizes,
        )
        filled = with_empty_rows(batch, plan.num_fillers)
        shard = make_shard(filled, plan.global_batches[0][place.data_parallel_rank], batch)
        result = trainer.train([shard], policy_gradient_loss())
        return Step(
            loss=result.global_loss,
            grad_norm=result.grad_norm,
            num_microbatches=result.num_microbatches,
            series=result.microbatch_metrics,
            experts=load_counts(result),
            weights={name: value.detach().numpy().copy() for name, value in trainer.chunks[0].named_parameters()},
        )


def assert_same_step(found: Step, expected: Step) -> None:
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    for name, value in expected.weights.items():
        np.testing.assert_allclose(found.weights[name], value, atol=5e-6, err_msg=name)


def random_tokens(generator: np.random.Generator, size: int) -> list[int]:
    tokens: list[int] = generator.integers(1, 64, size).tolist()
    return tokens


def five_sequences() -> list[Trajectory]:
    """Four trajectories, of which the first has two sequences; no two fit into 19 tokens."""
    generator = np.random.default_rng(5)
    rows = [
        tokens_of(random_tokens(generator, 4), random_tokens(generator, size), [-3.0] * size)
        for size in (15, 9, 12, 7, 14)
    ]
    alone = [with_tokens(trajectory(), row) for row in rows[2:]]
    return [with_tokens(trajectory(), *rows[:2]), *alone]


@pytest.mark.parametrize(
    "changes",
    [pytest.param({}, id="padded"), pytest.param(PACKED, id="packed"), full({"layer_spec": "local"}, id="local")],
)
def test_an_empty_row_changes_nothing(changes: dict[str, Any]) -> None:
    """Two ranks run three microbatches each, of which one is empty; one rank runs five."""
    ranks = run_ranks(step_of, 2, tiny_grpo_policy(2, **SETTINGS, **changes), five_sequences())
    (alone,) = run_ranks(step_of, 1, tiny_grpo_policy(1, **SETTINGS, **changes), five_sequences())
    assert [step.num_microbatches for step in (*ranks, alone)] == [3, 3, 5]
    for step in ranks:
        assert_same_step(step, alone)
    joined = join_metrics([step.series for step in ranks])
    for name, series in alone.series.items():
        assert joined[name].reduce() == pytest.approx(series.reduce(), rel=1e-4, abs=1e-6), name
    assert alone.experts is not None
    assert ranks[0].experts is not None
    np.testing.assert_array_equal(ranks[0].experts, alone.experts)


def shared_turn(*, is_trained_twice: bool = False) -> list[Trajectory]:
    """Four trajectories; the second sequence of the first one repeats the first and goes on."""
    first, second, others = two_turns()
    prompt = [*map(int, first.token_ids), *GIVEN]
    longer = tokens_of(prompt, second, [-3.0] * len(second))
    if is_trained_twice:
        longer.loss_mask[: len(first)] = first.loss_mask
    return [with_tokens(trajectory(), first, longer), *others]


def one_sequence() -> list[Trajectory]:
    """The same tokens, each trained on once, in a sequence each."""
    first, second, others = two_turns()
    whole = tokens_of([*map(int, first.token_ids), *GIVEN], second, [-3.0] * len(second))
    for name in ("loss_mask", "logprobs", "weight_versions"):
        vars(whole)[name][: len(first)] = vars(first)[name]
    return [with_tokens(trajectory(), whole), *others]


GIVEN = (7, 11, 13)


def two_turns() -> tuple[TokenSequence, list[int], list[Trajectory]]:
    generator = np.random.default_rng(6)
    first = tokens_of(random_tokens(generator, 4), random_tokens(generator, 8), [-3.0] * 8)
    return first, random_tokens(generator, 6), five_sequences()[1:]


def test_a_turn_of_two_sequences_is_trained_on_once() -> None:
    policy = tiny_grpo_policy(1, **SETTINGS)
    twice, once, again = (
        run_ranks(step_of, 1, policy, trajectories)[0]
        for trajectories in (shared_turn(), one_sequence(), shared_turn(is_trained_twice=True))
    )
    assert twice.num_microbatches == once.num_microbatches + 1
    assert_same_step(twice, once)
    assert abs(again.grad_norm / once.grad_norm - 1) > 1e-3, "the test would see it"
