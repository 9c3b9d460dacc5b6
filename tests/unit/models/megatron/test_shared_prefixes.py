# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A shared prefix that is computed once trains as separate sequences do, in every layout."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.distributed.batch import TokenBatch
from nemo_rl_moe.models.megatron.training.prefix_tree import PrefixTree
from tests.support.gloo_ranks import run_ranks
from tests.support.tiny_model import layout, logprobs_by_sequence, parallel_job, shard_of_rank, tiny_policy
from tests.support.training_run import RankRun, build_trainer, difference, weights_of

GROUPS = ((0, 1, 2, 3), (4, 5, 6, 7))


def test_distinct_tokens_are_nodes_of_a_forest() -> None:
    sequences = [[1, 2, 3, 4], [1, 2, 3, 5, 6], [1, 2, 7], [9, 9], [1, 2, 3, 4], [1, 2]]
    ids, lengths = np.concatenate(sequences), [len(tokens) for tokens in sequences]
    starts = [0, *np.cumsum(lengths)[:-1].tolist()]
    tree = PrefixTree.of([ids], starts, lengths)
    assert ids[tree.owner].tolist() == [1, 2, 9, 9, 3, 7, 4, 5, 6]
    assert (tree.lengths, tree.parents, tree.depths) == ([2, 2, 1, 1, 1, 2], [-1, -1, 0, 0, 2, 2], [0, 0, 2, 2, 3, 3])
    assert tree.positions().tolist() == [0, 1, 0, 1, 2, 2, 3, 3, 4]
    assert tree.predecessors().tolist() == [0, 0, 2, 2, 1, 1, 4, 4, 7]
    np.testing.assert_array_equal(ids[tree.owner][tree.source], ids[tree.copies])
    assert list(tree.families()) == [
        ([], range(2)),
        ([slice(0, 2)], range(2, 4)),
        ([slice(0, 2), slice(4, 5)], range(4, 6)),
    ]


def grouped_batch(seed: int) -> TokenBatch:
    """Return two groups of four ragged responses. In the second, two responses share a first turn too."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(number: int) -> torch.Tensor:
        return torch.randint(1, 64, (number,), generator=generator)

    prompts, turn = [tokens(7), tokens(4)], tokens(5)
    starts = [prompts[0]] * 4 + [prompts[1]] * 2 + [torch.cat([prompts[1], turn])] * 2
    sequences = [torch.cat([start, tokens(3 + 2 * (index % 4))]) for index, start in enumerate(starts)]
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    input_ids = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    position = torch.arange(input_ids.shape[1])
    first = torch.tensor([len(prompts[index // 4]) for index in range(len(sequences))])
    trained = (position >= first[:, None]) & (position < lengths[:, None])
    return TokenBatch(input_ids, lengths, trained, tuple(map(str, range(len(sequences)))))


@dataclass(frozen=True)
class Measured:
    run: RankRun
    logprobs: dict[int, np.ndarray]


def train_groups(policy: PolicyConfig, shares: bool, model: dict[str, Any]) -> Measured:
    """Run on every rank: return the run of two steps, and the log-probabilities before it."""
    with parallel_job(policy):
        trainer = build_trainer(policy, model)
        place = trainer.coordinates
        batches = [replace(grouped_batch(seed), shares_prefixes=shares) for seed in (1, 2)]
        shards = [shard_of_rank(batch, place.data_parallel_rank, place.data_parallel_size, GROUPS) for batch in batches]
        logprobs = logprobs_by_sequence(trainer, shards[0], batches[0], GROUPS)
        results = [trainer.train([shard], sft_loss) for shard in shards]
        return Measured(weights_of(trainer, results), logprobs)


@pytest.mark.parametrize(
    ("num_ranks", "sizes"),
    [
        (1, {}),
        (2, {}),
        (2, layout(tp=2)),
        (2, layout(pp=2)),
        (2, layout(ep=2)),
    ],
    ids=["one", "dp2", "tp2", "pp2", "ep2"],
)
@pytest.mark.parametrize("changes", [{}])
def test_training_equals_that_of_separate_sequences(
    num_ranks: int, sizes: dict[str, Any], changes: dict[str, Any]
) -> None:
    policy = tiny_policy(num_ranks, **sizes, **changes)
    separate = run_ranks(train_groups, 1, tiny_policy(1, **changes), False, {})
    shared = run_ranks(train_groups, num_ranks, policy, True, {})
    found = difference([each.run for each in shared], separate[0].run)
    assert found.loss < 1e-6, found
    assert found.grad_norm < 2e-6, found
    assert found.moe_metrics < 2e-6, found
    assert found.weights < 1e-5, found
    measured = {index: values for each in shared for index, values in each.logprobs.items()}
    assert measured.keys() == separate[0].logprobs.keys()
    for index, values in separate[0].logprobs.items():
        np.testing.assert_allclose(measured[index], values, atol=1e-5)
