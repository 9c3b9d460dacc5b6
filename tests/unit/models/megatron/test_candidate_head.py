# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Candidates at each position: numbers, gradients and choice are those of whole logits in float64, in every layout."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nemo_rl_moe.algorithms.losses.distillation import (
    TEACHER_LOGPROBS,
    TEACHER_SHARE,
    DistillationLoss,
    shares_of_means,
)
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.distributed.batch import TokenBatch, per_token
from nemo_rl_moe.models.candidates import CANDIDATE_IDS, candidate_column
from nemo_rl_moe.models.interfaces import Head, missing_heads
from nemo_rl_moe.models.megatron.training.chunked_head import chunked_top_candidates
from nemo_rl_moe.models.megatron.training.measurements import candidate_logprobs, top_candidates
from nemo_rl_moe.models.megatron.training.trainer import MegatronModel, MegatronTrainer
from tests.support.gloo_ranks import run_ranks, run_ranks_with_engine
from tests.support.quick_list import full, slow
from tests.support.tiny_model import (
    layout,
    parallel_job,
    shard_of_rank,
    sharing_sequences,
    tiny_batch,
    tiny_hf_config,
    tiny_policy,
)
from tests.support.training_run import tiny_trainer
from tests.unit.models.megatron.test_chunked_head import (
    COLUMNS,
    ROWS,
    TEMPERATURE,
    VOCABULARY,
    RankHead,
    as_arrays,
    assert_same_head,
    numbers,
    whole_logits,
)
from tests.unit.models.megatron.tiny_trainers import CHUNKED, PACKED, replay_policy, shard_for, with_random_routes

K = 4
# Not a multiple of 2: with tensor parallelism a row of the vocabulary is padding.
MODEL = {"vocab_size": 61}


def candidate_ids() -> Tensor:
    return torch.rand(ROWS, COLUMNS, VOCABULARY, generator=torch.Generator().manual_seed(4)).topk(K).indices


def of_candidates() -> Tensor:
    return torch.randn(ROWS, COLUMNS, K, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def head_in_chunks(world_size: int, sequence_parallel: bool) -> tuple[np.ndarray, ...]:
    with parallel_job(tiny_policy(world_size, **layout(tp=world_size))) as rank:
        given = numbers()
        head = RankHead.of(rank, world_size, given, sequence_parallel=sequence_parallel)
        found = head.statistics(given, candidate_ids().to(torch.int32))
        loss = (found.logprobs * given.of_logprobs).sum() + (found.candidates * of_candidates()).sum()
        (loss + (found.entropy * given.of_entropy).sum()).backward()
        with torch.no_grad():
            top_ids, top_logprobs, all_ids, all_logprobs = (
                values
                for number in (K, VOCABULARY)
                for values in chunked_top_candidates(head.model, head.hidden, TEMPERATURE, number, VOCABULARY)
            )
        assert torch.equal(all_ids.sort(-1).values, torch.arange(VOCABULARY).expand_as(all_ids))
        torch.testing.assert_close(all_logprobs[..., :K], top_logprobs)
        return as_arrays(found.candidates, top_ids, top_logprobs, head.hidden.grad, head.weight.grad)


def by_autograd() -> tuple[np.ndarray, ...]:
    given = numbers()
    hidden, weight, logits = whole_logits(given)
    log_p = logits.log_softmax(-1)
    candidates = log_p.gather(-1, candidate_ids())
    entropy = -(log_p.exp() * log_p).sum(-1)
    loss = (log_p.gather(-1, given.labels[..., None])[..., 0] * given.of_logprobs).sum()
    (loss + (candidates * of_candidates()).sum() + (entropy * given.of_entropy).sum()).backward()
    top = log_p.topk(K)
    return as_arrays(candidates, top.indices, top.values, hidden.grad, weight.grad)


@pytest.mark.parametrize(("world_size", "sequence_parallel"), [(1, False), full(2, False), (2, True)])
def test_numbers_gradients_and_choice_are_those_of_whole_logits(world_size: int, sequence_parallel: bool) -> None:
    ranks = run_ranks(head_in_chunks, world_size, world_size, sequence_parallel)
    assert_same_head(ranks, by_autograd(), sequence_parallel=sequence_parallel)


def test_logits_give_candidates_and_values_do_not() -> None:
    loss = divergence_loss("reverse")
    assert missing_heads(loss, {Head.LOGPROBS}) == set()
    assert missing_heads(loss, {Head.VALUE}) == {Head.LOGPROBS, Head.CANDIDATES}


def divergence_loss(kl_type: Any, **changes: Any) -> DistillationLoss:
    loss = DistillationLoss(kl_type, 0.5, True, 1.0, 0.0, 0.0, None)
    return replace(loss, **changes)


def with_teacher(batch: TokenBatch, k: int) -> TokenBatch:
    """The batch with candidates, and with numbers of a teacher that are a function of tokens and ids alone.

    The first sequence has no teacher, and holds no numbers.
    """
    generator = torch.Generator().manual_seed(11)
    ids = torch.rand(*batch.input_ids.shape, MODEL["vocab_size"], generator=generator).topk(k).indices
    logits = torch.sin(ids.float() + batch.input_ids[..., None])
    logprobs = logits.log_softmax(-1) - 0.1
    logprobs[0] = torch.nan
    counts = batch.token_mask.clone()
    counts[0] = False
    return batch.with_columns(
        **{
            CANDIDATE_IDS: candidate_column(ids.to(torch.int32)),
            TEACHER_LOGPROBS: per_token(logprobs),
            **shares_of_means(counts, [0]),
        }
    )


@dataclass(frozen=True)
class Seen:
    """What one rank saw in all steps; the divergence is this rank's share."""

    losses: list[float]
    grad_norms: list[float]
    evaluated: float
    trained: float  # in the first update
    logprobs: dict[int, np.ndarray]  # of the candidates by sequence, of ranks that report
    top: dict[int, tuple[np.ndarray, ...]]  # ids and log-probabilities of the likeliest tokens, likewise
    is_cleared: bool  # the models keep nothing of the last microbatch


def observe(policy: PolicyConfig, kl_type: str) -> Seen:
    with tiny_trainer(policy, MODEL) as trainer:
        place, batch = trainer.coordinates, with_teacher(tiny_batch(3, vocabulary_size=61), 5)
        shard = shard_for(trainer, batch)
        first, lengths = len(batch.lengths) // place.data_parallel_size * place.data_parallel_rank, batch.lengths
        found = [each for values in trainer.measure(shard.microbatches, candidate_logprobs) for each in values]
        logprobs = {row: each[: lengths[row]].numpy() for row, each in enumerate(found, first)}
        likeliest = trainer.measure(shard.microbatches, partial(top_candidates, k=K, vocabulary_size=61))
        pairs = [pair for each in likeliest for pair in zip(*each, strict=True)]
        top = {row: tuple(each[: lengths[row]].numpy() for each in pair) for row, pair in enumerate(pairs, first)}
        loss = divergence_loss(kl_type, cross_entropy_weight=0.1)
        evaluated = trainer.evaluate(shard, loss)
        results = [trainer.train([shard], loss) for _ in range(2)]
        trained = results[0].microbatch_metrics
        return Seen(
            [result.global_loss for result in results],
            [result.grad_norm for result in results],
            evaluated["teacher_kl"].reduce() if evaluated else 0.0,
            trained["teacher_kl"].reduce() if trained else 0.0,
            logprobs,
            top,
            all(chunk.candidates is None for chunk in trainer.chunks),
        )


@pytest.fixture(scope="module")
def expected() -> Seen:
    (found,) = run_ranks(observe, 1, tiny_policy(1), "mixed")
    return found


def test_evaluation_and_training_measure_the_same(expected: Seen) -> None:
    assert expected.evaluated == pytest.approx(expected.trained, rel=1e-5)
    assert expected.evaluated > 0.1
    assert expected.is_cleared


def test_the_first_prediction_is_that_of_the_second_token(expected: Seen) -> None:
    """The log-probability of a token is that of a candidate of the same id, from the first that is predicted on."""

    batch = tiny_batch(3, vocabulary_size=61)
    found = run_ranks(own_tokens_as_candidates, 1, tiny_policy(1, **PACKED))[0]
    for row, (candidates, logprobs) in found.items():
        length = int(batch.lengths[row])
        assert (logprobs[1:length] < 0).all()
        np.testing.assert_allclose(candidates[1:length, 0], logprobs[1:length], rtol=1e-6)


def own_tokens_as_candidates(policy: PolicyConfig) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    with parallel_job(policy):
        model = MegatronModel(policy, tiny_hf_config(**MODEL), None)
        batch = tiny_batch(3, vocabulary_size=61)
        ids = torch.stack([batch.input_ids, (batch.input_ids + 1) % 61], -1)
        shard = shard_of_rank(batch.with_columns(**{CANDIDATE_IDS: candidate_column(ids)}))
        candidates = [row.numpy() for rows in model.measure(shard.microbatches, candidate_logprobs) for row in rows]
        logprobs = [row.numpy() for rows in model.logprobs(shard.microbatches) for row in rows]
        return dict(enumerate(zip(candidates, logprobs, strict=True)))


@pytest.mark.parametrize(
    ("world_size", "changes"),
    [
        (1, PACKED),
        full(1, CHUNKED),
        full(2, {}),
        (2, layout(tp=2) | PACKED | CHUNKED),
        full(2, layout(tp=2)),
        full(2, layout(pp=2)),
        slow(2, layout(pp=2, vpp=2) | PACKED | CHUNKED),
        slow(2, layout(ep=2)),
    ],
)
def test_layouts_agree(world_size: int, changes: dict[str, Any], expected: Seen) -> None:
    _agree(run_ranks(observe, world_size, tiny_policy(world_size, **changes), "mixed"), expected)


def norm_under_replay(checkpointing: str, loss: DistillationLoss) -> float:
    with tiny_trainer(replay_policy(activation_checkpointing=checkpointing), MODEL) as trainer:
        batch = with_random_routes(with_teacher(tiny_batch(3, vocabulary_size=61), 5))
        return trainer.train([shard_for(trainer, batch)], loss).grad_norm


@pytest.mark.parametrize("checkpointing", ["moe", full("full")])
def test_recomputation_replays_for_a_loss_of_candidates_alone(checkpointing: str) -> None:
    """The backward pass begins at the candidates: the loss does not use the tokens' log-probabilities."""
    loss = divergence_loss("reverse")
    norms = [run_ranks(norm_under_replay, 1, each, loss)[0] for each in ("none", checkpointing)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


@pytest.mark.full
def test_ranks_that_share_sequences_agree() -> None:
    policy = tiny_policy(2, **PACKED)
    (wanted,) = run_ranks_with_engine(observe, 1, tiny_policy(1, **PACKED), "mixed")
    _agree(run_ranks_with_engine(observe, 2, sharing_sequences(policy, 2), "mixed"), wanted)


def _agree(ranks: list[Seen], wanted: Seen) -> None:
    for rank in ranks:
        assert rank.losses == pytest.approx(wanted.losses, rel=1e-5)
        assert rank.grad_norms == pytest.approx(wanted.grad_norms, rel=1e-4)
    shares = {rank.evaluated for rank in ranks} - {0.0}
    assert sum(shares) == pytest.approx(wanted.evaluated, rel=1e-5)
    for name in ("logprobs", "top"):
        rows = {row: values for rank in ranks for row, values in getattr(rank, name).items()}
        assert rows.keys() == getattr(wanted, name).keys()
        for row, values in rows.items():
            ours, theirs = (each if name == "top" else (each,) for each in (values, getattr(wanted, name)[row]))
            for found, other in zip(ours, theirs, strict=True):
                np.testing.assert_allclose(found[1:], other[1:], atol=1e-4)


def divergences_of_training(policy: PolicyConfig, kl_type: str, k: int) -> tuple[list[float], list[float]]:
    """The trained divergence of each step, and KL(policy || teacher) over the whole vocabulary before and after."""
    with parallel_job(policy):
        teacher = MegatronModel(policy.model_copy(update={"init_seed": 77}), tiny_hf_config(**MODEL), None)
        trainer = MegatronTrainer(policy, tiny_hf_config(**MODEL), None, num_steps=40)
        batch = tiny_batch(3, vocabulary_size=61)
        shares = shares_of_means(batch.token_mask, [0])
        shard = shard_of_rank(batch)

        def rows(model: MegatronModel, batch: TokenBatch) -> Tensor:
            found = model.measure(shard_of_rank(batch).microbatches, candidate_logprobs)
            whole = torch.zeros(*batch.input_ids.shape, found[0].shape[-1])
            for index, row in enumerate(row for rows in found for row in rows):
                whole[index, : len(row)] = row
            return whole

        def whole_divergence() -> float:
            everything = torch.arange(61).expand(*batch.input_ids.shape, 61)
            asked = batch.with_columns(**{CANDIDATE_IDS: candidate_column(everything)})
            ours, theirs = rows(trainer, asked), rows(teacher, asked)
            return float(((ours.exp() * (ours - theirs)).sum(-1) * shares[TEACHER_SHARE].values).sum())

        exact, losses = [whole_divergence()], []
        for _ in range(30):
            likeliest = trainer.measure(shard.microbatches, partial(top_candidates, k=k, vocabulary_size=61))
            ids = torch.zeros(*batch.input_ids.shape, k, dtype=torch.int32)
            for index, row in enumerate(row for found, _ in likeliest for row in found):
                ids[index, : len(row)] = row
            asked = batch.with_columns(**{CANDIDATE_IDS: candidate_column(ids)})
            columns = {TEACHER_LOGPROBS: per_token(rows(teacher, asked)), **shares}
            trained = trainer.train([shard_of_rank(asked.with_columns(**columns))], divergence_loss(kl_type))
            losses.append(trained.microbatch_metrics["teacher_kl"].reduce())
        return losses, [*exact, whole_divergence()]


@pytest.mark.full
@pytest.mark.parametrize(("kl_type", "k"), [("reverse", 8), ("forward", 8), ("jensen_shannon", 61)])
def test_a_policy_comes_to_a_teacher_in_one_process(kl_type: str, k: int) -> None:
    ((losses, exact),) = run_ranks(divergences_of_training, 1, tiny_policy(1, moe_aux_loss_coeff=0.0), kl_type, k)
    assert losses[-1] < 0.3 * losses[0]
    assert exact[1] < 0.5 * exact[0]
