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
from nemo_rl_moe.distributed.batch import Destination, TokenBatch, per_token
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.megatron.model.transformer_config import build_transformer_config
from nemo_rl_moe.models.megatron.training.prefix_tree import PrefixTree
from nemo_rl_moe.routing.replay import ROUTED_EXPERTS
from tests.support.family_models import FAMILY_MODELS
from tests.support.gloo_ranks import run_ranks, run_ranks_with_engine
from tests.support.tiny_model import (
    layout,
    logprobs_by_sequence,
    shard_of_rank,
    tiny_grpo_policy,
    tiny_policy,
)
from tests.support.training_run import Difference, RankRun, difference, tiny_trainer, weights_of

WITHOUT = ("qwen3_next", "qwen3_5", "nemotron_h")
"""Families with gated delta nets or Mamba-2 layers."""
GROUPS = ((0, 1, 2, 3), (4, 5, 6, 7))
# Largest seen: 6e-8, 3e-7, 1e-6 and 2e-6.
TOLERANCE = Difference(loss=5e-7, grad_norm=2e-6, moe_metrics=2e-6, weights=1e-5)


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
        return torch.randint(1, 60, (number,), generator=generator)

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


def train_groups(policy: PolicyConfig, shares: bool, model: dict[str, Any] | str) -> Measured:
    """Run on every rank: return the run of two steps, and the log-probabilities before it."""
    with tiny_trainer(policy, model) as trainer:
        place = trainer.coordinates
        batches = [replace(grouped_batch(seed), shares_prefixes=shares) for seed in (1, 2)]
        shards = [shard_of_rank(batch, place.data_parallel_rank, place.data_parallel_size, GROUPS) for batch in batches]
        logprobs = logprobs_by_sequence(trainer, shards[0], batches[0], GROUPS)
        results = [trainer.train([shard], sft_loss) for shard in shards]
        return Measured(weights_of(trainer, results), logprobs)


def assert_same_training(
    policy: PolicyConfig, num_ranks: int, alone: PolicyConfig, model: dict[str, Any] | str
) -> None:
    """Compare shared prefixes in a layout with separate sequences on one rank."""
    (separate,) = run_ranks(train_groups, 1, alone, False, model)
    shared = run_ranks(train_groups, num_ranks, policy, True, model)
    found = difference([each.run for each in shared], separate.run)
    for name, limit in vars(TOLERANCE).items():
        assert getattr(found, name) <= limit, f"{name}: {found}"
    measured = {index: values for each in shared for index, values in each.logprobs.items()}
    assert measured.keys() == separate.logprobs.keys()
    for index, values in separate.logprobs.items():
        np.testing.assert_allclose(measured[index], values, atol=1e-5)


LAYOUTS = {
    "dp2": (2, {}),
    "tp2": (2, layout(tp=2)),
    "pp2": (2, layout(pp=2)),
    "ep2": (2, layout(ep=2)),
    "tp2_pp2_ep2": (4, layout(tp=2, pp=2, ep=2)),
}
BIAS = {
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_bias_update_rate": 0.01,
    "moe_z_loss_coeff": 0.01,
}
PACKED = {"sequence_packing__enabled": True, "sequence_packing__train_mb_tokens": 200}
CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "recompute_full": {"activation_checkpointing": "full"},
    "recompute_moe": {"activation_checkpointing": "moe"},
    "sequence_loss": {"moe_router_load_balancing_type": "seq_aux_loss"},
    "expert_bias_and_z_loss": BIAS,
    "packed_in_chunks": PACKED | {"logprob_chunk_size": 16},
}


@pytest.mark.parametrize("changes", CHANGES)
def test_one_rank_trains_as_with_separate_sequences(changes: str) -> None:
    policy = tiny_policy(1, **CHANGES[changes])
    assert_same_training(policy, 1, policy, {})


@pytest.mark.full
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("changes", ["plain", "recompute_full", "sequence_loss", "expert_bias_and_z_loss"])
def test_every_layout_trains_as_separate_sequences_do(name: str, changes: str) -> None:
    num_ranks, sizes = LAYOUTS[name]
    policy = tiny_policy(num_ranks, **sizes, **CHANGES[changes])
    assert_same_training(policy, num_ranks, tiny_policy(1, **CHANGES[changes]), {})


@pytest.mark.full
def test_latent_attention_trains_as_with_separate_sequences_in_a_layout() -> None:
    num_ranks, sizes = LAYOUTS["tp2_pp2_ep2"]
    changes = {"activation_checkpointing": "full"}
    policy = tiny_policy(num_ranks, **sizes, **changes)
    assert_same_training(policy, num_ranks, tiny_policy(1, **changes), "deepseek_v3")


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILY_MODELS)
def test_families_train_as_with_separate_sequences_or_are_refused(family: str) -> None:
    policy, hf_config = tiny_policy(1, shared_prefix=True), FAMILY_MODELS[family].hf_config()
    if family.startswith(WITHOUT) or family.endswith("_sparse"):
        with pytest.raises(
            ConfigurationError, match=r"policy\.shared_prefix: got true, expected false for a model with"
        ):
            build_transformer_config(policy, hf_config)
    else:
        build_transformer_config(policy, hf_config)
        assert_same_training(policy, 1, policy, family)


def captured_routes(batch: TokenBatch) -> torch.Tensor:
    """Return random experts of each token but a sequence's last. Sequences whose tokens are equal so far agree.

    Only in layer 2, sequence 2 has other experts for the second token of its prompt, as in an engine that rounds
    differently.
    """
    generator = torch.Generator().manual_seed(5)
    by_prefix: dict[tuple[int, ...], torch.Tensor] = {}
    routes = torch.full((*batch.input_ids.shape, 4, 2), -1, dtype=torch.int16)
    for row, length in enumerate(batch.lengths.tolist()):
        for end in range(1, length):
            prefix = tuple(batch.input_ids[row, :end].tolist())
            if prefix not in by_prefix:
                by_prefix[prefix] = torch.rand(4, 8, generator=generator).topk(2, -1).indices.to(torch.int16)
            routes[row, end - 1] = by_prefix[prefix]
    routes[2, 1, 2] = (routes[2, 1, 2] + 1) % 8
    return routes


def replay_groups(policy: PolicyConfig, shares: bool, corrected: bool) -> RankRun:
    """Train one step with replay, with the differing experts or without them."""
    with tiny_trainer(policy) as trainer:
        place, batch = trainer.coordinates, grouped_batch(1)
        routes = captured_routes(batch)
        if corrected:
            routes[2, 1, 2] = routes[0, 1, 2]
        batch = replace(batch, shares_prefixes=shares).with_columns(
            **{ROUTED_EXPERTS: per_token(routes, Destination.MODEL, fill=-1)}
        )
        shard = shard_of_rank(batch, place.data_parallel_rank, place.data_parallel_size, GROUPS)
        return weights_of(trainer, [trainer.train([shard], sft_loss)])


@pytest.mark.parametrize("name", ["one", *(pytest.param(name, marks=pytest.mark.full) for name in LAYOUTS)])
def test_replay_takes_the_first_sequences_experts_and_reports_others(name: str) -> None:
    """A prompt whose captured experts differ among its responses lowers the agreement by exactly these rows."""
    num_ranks, sizes = LAYOUTS.get(name, (1, {}))
    replays = {"routing_replay": "rollout"}
    separate = run_ranks(replay_groups, 1, tiny_grpo_policy(1, **replays), False, True)
    policy = tiny_grpo_policy(num_ranks, **replays, **sizes)
    shared = run_ranks(replay_groups, num_ranks, policy, True, True)
    differing = run_ranks(replay_groups, num_ranks, policy, True, False)
    for found in (shared, differing):
        # Rank 0 alone reports on routes.
        bare, (expected,) = ([replace(run, moe_metrics=[]) for run in runs] for runs in (found, separate))
        measured = difference(bare, expected)
        assert measured.loss <= TOLERANCE.loss
        assert measured.grad_norm <= TOLERANCE.grad_norm
        assert measured.weights <= TOLERANCE.weights
    num_rows = 4 * int((grouped_batch(1).lengths - 1).sum())
    assert shared[0].moe_metrics[0]["routing/agreement"] == 1
    assert differing[0].moe_metrics[0]["routing/agreement"] == pytest.approx(1 - 1 / num_rows, abs=1e-9)
    assert differing[0].moe_metrics[0]["routing/anomalies"] == shared[0].moe_metrics[0]["routing/anomalies"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("qwen3_moe", "one"),
        ("qwen3_moe", "tp2"),
        ("qwen3_moe", "pp2"),
        ("gpt_oss", "ep2"),
        ("glm4_moe", "tp2_pp2_ep2"),
        ("deepseek_v3", "tp2"),
    ],
)
def test_the_modules_of_gpus_train_as_with_separate_sequences(model: str, name: str) -> None:
    """Transformer Engine's stand-in takes each node as a packed sequence whose keys are those of its path."""
    num_ranks, sizes = LAYOUTS.get(name, (1, {}))
    policy = tiny_policy(num_ranks, shared_prefix=True, **sizes)
    (separate,) = run_ranks(train_groups, 1, tiny_policy(1), False, model)
    shared = run_ranks_with_engine(train_groups, num_ranks, policy, True, model)
    found = difference([each.run for each in shared], separate.run)
    for metric, limit in vars(TOLERANCE).items():
        assert getattr(found, metric) <= 4 * limit, f"{metric}: {found}"
