# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities over the tokens that top-k and top-p kept: those of masked logits in float64, in every layout."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.distributed.batch import TokenBatch
from nemo_rl_moe.generation.interface import GeneratedSequence
from nemo_rl_moe.models.kept_tokens import KEPT_TOKENS, NONE_KEPT, check_kept_tokens, kept_tokens_column
from tests.support.gloo_ranks import run_ranks, run_ranks_with_engine
from tests.support.quick_list import full, slow
from tests.support.tiny_model import (
    layout,
    logprobs_by_sequence,
    parallel_job,
    shard_of_rank,
    sharing_sequences,
    tiny_policy,
)
from tests.support.training_run import (
    PROMPT_LENGTHS,
    SAMPLING,
    build_trainer,
    generator_of,
    prompts,
    request_of,
    tiny_trainer,
)
from tests.unit.models.megatron.test_chunked_head import (
    COLUMNS,
    ROWS,
    VOCABULARY,
    RankHead,
    as_arrays,
    assert_same_head,
    numbers,
    whole_logits,
)
from tests.unit.models.megatron.tiny_trainers import CHUNKED, PACKED

K = 9
GROUPS = ((0, 1), (2, 3), (4, 5))
KEPT_SAMPLING = replace(SAMPLING, temperature=1.0, top_k=K, top_p=0.6, returns_kept_tokens=True)
# Not a multiple of 2: with tensor parallelism a row of the vocabulary is padding.
MODEL = {"vocab_size": 65}


def kept_ids() -> Tensor:
    """The label and others, from 1 to 5 of them; nothing of two places, which nobody sampled."""
    generator = torch.Generator().manual_seed(4)
    weights = torch.rand(ROWS, COLUMNS, VOCABULARY, generator=generator)
    weights.scatter_(-1, numbers().labels[..., None], 2.0)
    ids = weights.topk(5).indices
    counts = torch.randint(1, 6, (ROWS, COLUMNS, 1), generator=generator)
    ids = ids.where(torch.arange(5) < counts, NONE_KEPT)
    ids[0, :2] = NONE_KEPT
    return ids.to(torch.int32)


def head_over_kept(world_size: int, sequence_parallel: bool) -> tuple[np.ndarray, ...]:
    with parallel_job(tiny_policy(world_size, **layout(tp=world_size))) as rank:
        given = numbers()
        head = RankHead.of(rank, world_size, given, sequence_parallel=sequence_parallel)
        found = head.statistics(given, kept_ids()).over_kept(kept_ids())
        (found.logprobs * given.of_logprobs).sum().backward()
        return as_arrays(found.logprobs, head.hidden.grad, head.weight.grad)


def by_autograd() -> tuple[np.ndarray, ...]:
    given, ids = numbers(), kept_ids().long()
    hidden, weight, logits = whole_logits(given)
    is_kept = torch.zeros(ROWS, COLUMNS, VOCABULARY + 1, dtype=torch.bool)
    is_kept.scatter_(-1, ids.where(ids >= 0, VOCABULARY), value=True)
    is_kept = is_kept[..., :VOCABULARY] | (ids[..., :1] < 0)
    log_p = logits.masked_fill(~is_kept, -torch.inf).log_softmax(-1)
    logprobs = log_p.gather(-1, given.labels[..., None])[..., 0]
    (logprobs * given.of_logprobs).sum().backward()
    return as_arrays(logprobs, hidden.grad, weight.grad)


@pytest.mark.parametrize(("world_size", "sequence_parallel"), [(1, False), full(2, False), (2, True)])
def test_numbers_and_gradients_are_those_of_masked_logits(world_size: int, sequence_parallel: bool) -> None:
    ranks = run_ranks(head_over_kept, world_size, world_size, sequence_parallel)
    assert_same_head(ranks, by_autograd(), sequence_parallel=sequence_parallel)


def batch_of(sequences: list[GeneratedSequence]) -> TokenBatch:
    """Prompts and responses, with what the responses were drawn from."""
    rows = [
        torch.tensor([*prompt, *each.token_ids.tolist()]) for prompt, each in zip(prompts(), sequences, strict=True)
    ]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    lengths, starts = torch.tensor([len(row) for row in rows]), torch.tensor(PROMPT_LENGTHS)
    places = torch.arange(ids.shape[1])
    mask = (places >= starts[:, None]) & (places < lengths[:, None])
    column = kept_tokens_column([each.kept_tokens for each in sequences])
    assert column is not None
    batch = TokenBatch(ids, lengths, mask, tuple(map(str, range(len(rows)))), stored={KEPT_TOKENS: column})
    return batch.fetched(list)


def sampled(policy: PolicyConfig) -> list[GeneratedSequence]:
    with parallel_job(policy):
        return generator_of(build_trainer(policy, MODEL)).generate(
            request_of(range(len(PROMPT_LENGTHS)), KEPT_SAMPLING), weight_version=0
        )


@pytest.fixture(scope="module")
def sequences() -> list[GeneratedSequence]:
    return run_ranks(sampled, 1, tiny_policy(1))[0]


def ids_of(sequence: GeneratedSequence) -> np.ndarray:
    assert sequence.kept_tokens is not None
    (piece,) = sequence.kept_tokens.pieces
    ids: np.ndarray = piece.source
    return ids


def test_the_engine_returns_what_it_drew_from(sequences: list[GeneratedSequence]) -> None:
    for prompt, sequence in zip(prompts(), sequences, strict=True):
        assert sequence.kept_tokens is not None
        (piece,) = sequence.kept_tokens.pieces
        assert (piece.start, piece.num_rows, piece.source.shape[1]) == (len(prompt), len(sequence.token_ids), K)
        assert (piece.source == sequence.token_ids[:, None]).any(1).all()
    counts = np.concatenate([(ids_of(each) >= 0).sum(1) for each in sequences])
    assert counts.min() >= 1
    assert counts.max() < K  # the model is close to even: top-p cuts further


@pytest.mark.full
def test_ranks_that_share_the_vocabulary_return_the_same(sequences: list[GeneratedSequence]) -> None:
    found = run_ranks(sampled, 2, tiny_policy(2, **layout(tp=2)))
    (ours,) = [each for each in found if each]
    for one, other in zip(ours, sequences, strict=True):
        np.testing.assert_array_equal(ids_of(one), ids_of(other))


@dataclass(frozen=True)
class Seen:
    """Log-probabilities of this rank's sequences; loss of two updates, and the norm of the first gradient."""

    logprobs: dict[int, np.ndarray]
    losses: list[float]
    grad_norm: float


def trained(policy: PolicyConfig, batch: TokenBatch) -> Seen:
    with tiny_trainer(policy, MODEL) as trainer:
        shard = shard_of_rank(batch, microbatches=GROUPS)
        logprobs = logprobs_by_sequence(trainer, shard, batch, GROUPS)
        results = [trainer.train([shard], sft_loss) for _ in range(2)]
        return Seen(logprobs, [result.global_loss for result in results], results[0].grad_norm)


@pytest.fixture(scope="module")
def expected(sequences: list[GeneratedSequence]) -> Seen:
    return run_ranks(trained, 1, tiny_policy(1), batch_of(sequences))[0]


def test_training_has_the_engine_s_log_probabilities(sequences: list[GeneratedSequence], expected: Seen) -> None:
    for index, sequence in enumerate(sequences):
        response = expected.logprobs[index][PROMPT_LENGTHS[index] :]
        np.testing.assert_allclose(response, sequence.logprobs, rtol=0, atol=1e-5)
    mean = -np.concatenate([sequence.logprobs for sequence in sequences]).mean()
    assert expected.losses[0] == pytest.approx(mean, rel=1e-5)
    assert expected.losses[1] < expected.losses[0]
    assert mean < np.log(K)


@pytest.mark.parametrize(
    ("world_size", "changes"),
    [
        (1, PACKED),
        full(1, CHUNKED),
        full(2, layout(tp=2)),
        (2, layout(tp=2) | PACKED | CHUNKED),
        full(2, layout(pp=2)),
        slow(2, layout(pp=2, vpp=2) | PACKED),
    ],
)
def test_layouts_agree(
    world_size: int, changes: dict[str, Any], sequences: list[GeneratedSequence], expected: Seen
) -> None:
    assert_same(run_ranks(trained, world_size, tiny_policy(world_size, **changes), batch_of(sequences)), expected)


@pytest.mark.full
def test_ranks_that_share_sequences_agree(sequences: list[GeneratedSequence], expected: Seen) -> None:
    policy = sharing_sequences(tiny_policy(2, **PACKED), 2)
    assert_same(run_ranks_with_engine(trained, 2, policy, batch_of(sequences)), expected)


def assert_same(ranks: list[Seen], expected: Seen) -> None:
    for rank in ranks:
        assert rank.losses == pytest.approx(expected.losses, rel=1e-4)
        assert rank.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
    found = {index: row for rank in ranks for index, row in rank.logprobs.items()}
    assert found.keys() == expected.logprobs.keys()
    for index, row in found.items():
        np.testing.assert_allclose(row[1:], expected.logprobs[index][1:], rtol=0, atol=1e-4)


def test_a_trained_token_without_kept_tokens_is_an_error(sequences: list[GeneratedSequence]) -> None:
    batch = batch_of(sequences)
    check_kept_tokens(batch)
    column = kept_tokens_column([None, *(each.kept_tokens for each in sequences[1:])])
    assert column is not None
    lost = replace(batch.select(range(len(sequences))), stored={KEPT_TOKENS: column}).fetched(list)
    count, total = len(sequences[0].token_ids), sum(len(each.token_ids) for each in sequences)
    with pytest.raises(RuntimeError, match=rf"sampling_mask: replay: {count} of {total} trained tokens have no "):
        check_kept_tokens(lost)
