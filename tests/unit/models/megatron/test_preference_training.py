# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Three steps of DPO with the real model are the same however pairs are cut, packed and shared between ranks."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from nemo_rl_moe.algorithms.dpo import add_reference_sums
from nemo_rl_moe.algorithms.losses.supervised import PreferenceLoss
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.data.preferences import REFERENCE_SUMS
from nemo_rl_moe.distributed.batch import TokenBatch, make_shard, per_sequence
from nemo_rl_moe.distributed.microbatches import plan_evaluation, plan_microbatches
from nemo_rl_moe.metrics import PhaseClock
from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer
from nemo_rl_moe.models.policy.model_workers import choose_batching
from tests.support.gloo_ranks import run_ranks
from tests.support.tiny_model import layout, tiny_batch, tiny_policy
from tests.support.training_run import tiny_trainer
from tests.unit.algorithms.preference_reference import config_of

NUM_PAIRS, NUM_STEPS = 4, 3
LOSS = PreferenceLoss(config_of(reference_policy_kl_penalty=0.5, sft_loss_weight=0.1, sft_average_log_probs=True))

WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "one pair at a time": (1, {"train_micro_batch_size": 1}),
    "packed": (1, {"sequence_packing__enabled": True, "sequence_packing__train_mb_tokens": 128}),
    "dynamic": (1, {"dynamic_batching__enabled": True, "dynamic_batching__train_mb_tokens": 128}),
    "two ranks": (2, {"train_micro_batch_size": 1}),
    "two ranks, packed": (2, {"sequence_packing__enabled": True, "sequence_packing__train_mb_tokens": 128}),
    "two stages, packed": (
        2,
        {"sequence_packing__enabled": True, "sequence_packing__train_mb_tokens": 128, **layout(pp=2)},
    ),
}


@dataclass(frozen=True)
class Training:
    """Global loss, gradient norm and this rank's shares of the metrics of each step."""

    losses: list[float]
    grad_norms: list[float]
    metrics: list[dict[str, float]]


@dataclass(frozen=True)
class OneRank:
    """Just enough of a policy for the reference's sums: every rank measures the whole batch by itself."""

    trainer: MegatronTrainer

    def reference_logprobs(self, batch: TokenBatch) -> Any:
        plan = plan_evaluation(
            batch.lengths.tolist(),
            num_data_parallel_ranks=1,
            batching=choose_batching(self.trainer.policy, 4),
            group_size=2,
        )
        result = batch.input_ids.float() * 0
        microbatches = [batch.select(rows) for rows in plan.by_rank[0]]
        for rows, found in zip(plan.by_rank[0], self.trainer.reference_logprobs(microbatches), strict=True):
            result[list(rows), : found.shape[1]] = found
        return result


def pairs_of_step(step: int) -> TokenBatch:
    return replace(tiny_batch(300 + step), group_size=2)


def train(policy: PolicyConfig, reference: list[list[float]] | None) -> tuple[Training, list[list[float]]]:
    """Runs on every rank. Where no reference is given, it is measured."""
    with tiny_trainer(policy, keep_reference=True) as trainer:
        place, losses, norms, metrics, sums = trainer.coordinates, [], [], [], []
        for step in range(NUM_STEPS):
            batch = pairs_of_step(step)
            if reference is None:
                batch = add_reference_sums(OneRank(trainer), batch, PhaseClock())  # type: ignore[arg-type]
            else:
                batch = replace(
                    batch, columns={REFERENCE_SUMS: per_sequence(torch.tensor(reference[step], dtype=torch.float64))}
                )
            plan = plan_microbatches(
                batch.lengths.tolist(),
                num_data_parallel_ranks=place.data_parallel_size,
                global_batch_size=NUM_PAIRS,
                batching=choose_batching(policy, policy.train_micro_batch_size),
                group_size=batch.group_size,
            )
            shard = make_shard(batch, plan.global_batches[0][place.data_parallel_rank], batch)
            result = trainer.train([shard], LOSS)
            losses.append(result.global_loss)
            norms.append(result.grad_norm)
            metrics.append({name: series.reduce() for name, series in result.microbatch_metrics.items()})
            sums.append(batch.columns[REFERENCE_SUMS].values.tolist())
        return Training(losses, norms, metrics), sums


def policy_of(ranks: int, changes: dict[str, Any]) -> PolicyConfig:
    # A balancing loss is one of a microbatch, and so depends on the cut.
    fixed = {"train_global_batch_size": NUM_PAIRS, "max_total_sequence_length": 32, "moe_aux_loss_coeff": 0.0}
    return tiny_policy(ranks, **{"train_micro_batch_size": 2, **fixed, **changes})


@pytest.fixture(scope="module")
def plain() -> tuple[Training, list[list[float]]]:
    """Two pairs a microbatch on one rank, the reference measured in the step."""
    ((training, sums),) = run_ranks(train, 1, policy_of(1, {}), None)
    return training, sums


def test_training_starts_at_the_reference_and_leaves_it(plain: tuple[Training, list[list[float]]]) -> None:
    first, *later = plain[0].metrics
    assert first["reward_margin"] == pytest.approx(0.0, abs=1e-5)
    assert first["preference_loss"] == pytest.approx(0.693147, abs=1e-5)
    assert all(abs(metrics["rewards_chosen_mean"]) > 1e-3 for metrics in later)
    assert first["num_valid_pairs"] == NUM_PAIRS


# In the others' cuts these are one part.
SLOW_WAYS = {"packed", "two ranks"}


@pytest.mark.full
@pytest.mark.parametrize("way", [pytest.param(way, marks=pytest.mark.slow if way in SLOW_WAYS else ()) for way in WAYS])
def test_every_cut_trains_alike(plain: tuple[Training, list[list[float]]], way: str) -> None:
    expected, sums = plain
    ranks, changes = WAYS[way]
    runs = [training for training, _ in run_ranks(train, ranks, policy_of(ranks, changes), sums)]
    for run in runs:
        assert run.losses == pytest.approx(expected.losses, rel=2e-6)
        assert run.grad_norms == pytest.approx(expected.grad_norms, rel=2e-5)
    for step, wanted in enumerate(expected.metrics):
        reporting = [run.metrics[step] for run in runs if run.metrics[step]]
        if step == 0:
            # Every margin is 0 but for rounding, whose sign says nothing.
            wanted.pop("accuracy", None)
        found = {name: sum(metrics[name] for metrics in reporting) for name in wanted}
        assert found == pytest.approx(wanted, rel=1e-4, abs=2e-5)
