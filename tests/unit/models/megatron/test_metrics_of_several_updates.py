# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Metrics of a step of several updates: each is one mean over what it is a mean of, however updates divide it."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from nemo_rl_moe.algorithms.losses.policy_gradient import PolicyGradientLoss
from nemo_rl_moe.algorithms.losses.value import ValueLoss
from nemo_rl_moe.algorithms.step_metrics import training_metrics
from nemo_rl_moe.config.loading import load_grpo_config
from nemo_rl_moe.distributed.batch import TokenBatch, per_sequence, per_token
from nemo_rl_moe.models.interfaces import Head, LossFunction, TrainResult
from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer
from nemo_rl_moe.models.rank_results import RankTrainResult
from tests.support.gloo_ranks import run_ranks
from tests.support.tiny_model import parallel_job, shard_of_rank, tiny_batch, tiny_hf_config, tiny_policy
from tests.support.training_run import tiny_trainer

FEW = ((0, 3), (0, 4))
"""Row and place of the trained tokens of a small global batch."""


def batch_with(gap: float, trained: tuple[tuple[int, int], ...] | None = None) -> TokenBatch:
    """A global batch whose engine and trainer differ by `gap` nats at each token; None: all of its targets count."""
    batch = tiny_batch(0)
    shape = batch.input_ids.shape
    if trained is not None:
        mask = torch.zeros_like(batch.token_mask)
        for row, place in trained:
            mask[row, place] = True
        batch = replace(batch, token_mask=mask)
    return batch.with_columns(
        prev_logprobs=per_token(torch.full(shape, -4.0)),
        generation_logprobs=per_token(torch.full(shape, -4.0 - gap)),
        advantages=per_sequence(torch.linspace(-1, 2, len(batch))),
        returns=per_token(torch.ones(shape)),
    )


LARGE, SMALL, EMPTY = batch_with(0.1), batch_with(1.0, FEW), batch_with(0.1, ())


def loss_of(kind: str) -> LossFunction:
    if kind == "critic":
        return ValueLoss()
    sequences = ["loss_fn.token_level_loss=false"] if kind == "sequences" else []
    config = load_grpo_config("examples/configs/grpo_tiny_moe.yaml", sequences, check_paths=False)
    return PolicyGradientLoss(config.loss_fn, prev_is_current=False)


def results_of(kind: str, calls: list[list[TokenBatch]]) -> list[RankTrainResult]:
    """The result of each call of a trainer."""
    policy = tiny_policy()
    with parallel_job(policy):
        heads = [Head.VALUE if kind == "critic" else Head.LOGPROBS]
        trainer = MegatronTrainer(policy, tiny_hf_config(), None, num_steps=10, heads=heads)
        return [trainer.train([shard_of_rank(batch) for batch in call], loss_of(kind)) for call in calls]


def as_logged(result: RankTrainResult) -> dict[str, float]:
    """The metrics of a step, those of the routing left out."""
    of_driver = TrainResult(
        result.global_loss,
        result.grad_norm,
        result.lr,
        result.num_microbatches,
        0,
        result.microbatch_metrics,
        {},
        num_updates=result.num_updates,
    )
    return training_metrics(of_driver)


@pytest.mark.parametrize("kind", ["tokens", "sequences", "critic"])
def test_an_update_without_a_trained_token_counts_in_no_mean(kind: str) -> None:
    ((alone, beside, first, nothing),) = run_ranks(
        several_trainers, 1, kind, [[[LARGE]], [[LARGE, EMPTY]], [[EMPTY, LARGE]], [[EMPTY]]]
    )
    expected = as_logged(alone[0])
    for (result,) in (beside, first):
        found = as_logged(result)
        assert found.pop("train/num_microbatches") == 2 * expected["train/num_microbatches"]
        assert found == {key: value for key, value in expected.items() if key != "train/num_microbatches"}
    assert as_logged(nothing[0]) == {}, "no token, no mean"


def several_trainers(kind: str, runs: list[list[list[TokenBatch]]]) -> list[list[RankTrainResult]]:
    return [results_of(kind, calls) for calls in runs]


@pytest.mark.parametrize("kind", ["tokens", "sequences", "critic"])
def test_each_update_counts_as_much_as_it_has_tokens_or_sequences(kind: str) -> None:
    ((together, apart),) = run_ranks(several_trainers, 1, kind, [[[LARGE, SMALL]], [[LARGE], [SMALL]]])
    found, (large, small) = as_logged(together[0]), (as_logged(result) for result in apart)
    num_tokens = (LARGE.num_valid_tokens(), len(FEW))
    sizes = (8, 1) if kind == "sequences" else num_tokens
    for name in ("loss", "grad_norm"):
        by_hand = np.average([large[f"train/{name}"], small[f"train/{name}"]], weights=sizes)
        assert found[f"train/{name}"] == pytest.approx(by_hand, rel=1e-6)
    assert found["train/num_valid_tokens"] == sum(num_tokens)
    if kind == "critic":
        by_hand = np.average([large["train/squared_error"], small["train/squared_error"]], weights=num_tokens)
        assert found["train/squared_error"] == pytest.approx(by_hand, rel=1e-6)
    else:
        by_hand = np.average(np.exp([0.1, 1.0]), weights=num_tokens)
        assert found["train/token_mult_prob_error"] == pytest.approx(by_hand, rel=1e-5)
        assert found["train/sampling_importance_ratio_max"] == pytest.approx(np.exp(1.0), rel=1e-5)
        assert found["train/sampling_importance_ratio_min"] == pytest.approx(np.exp(0.1), rel=1e-5)


def moves_of_updates(kind: str) -> tuple[list[bool], list[int]]:
    """Whether the weights move in an update, one whose advantages are 0, and one without a trained token; versions."""
    policy = tiny_policy(moe_aux_loss_coeff=0.0)
    nothing_to_prefer = LARGE.with_columns(advantages=per_sequence(torch.zeros(len(LARGE))))
    with tiny_trainer(policy) as trainer:
        moved, versions = [], []
        for batch in (LARGE, nothing_to_prefer, EMPTY):
            before = [weight.detach().clone() for chunk in trainer.chunks for weight in chunk.parameters()]
            versions.append(trainer.train([shard_of_rank(batch)], loss_of(kind)).weight_version)
            after = [weight for chunk in trainer.chunks for weight in chunk.parameters()]
            moved.append(any(not torch.equal(*pair) for pair in zip(before, after, strict=True)))
        return moved, versions


def test_an_update_whose_advantages_are_zero_is_one_and_one_without_tokens_is_none() -> None:
    """Adam goes on by its momentum, and auxiliary losses and penalties have their gradients, as in other frameworks."""
    ((moved, versions),) = run_ranks(moves_of_updates, 1, "tokens")
    assert moved == [True, True, False]
    assert versions == [1, 2, 2]
