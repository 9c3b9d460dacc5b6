# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Positions that indexers choose in generation: captured as transformers chooses them, and wrong ones named."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.distributed.batch import TokenBatch, stored_per_token
from nemo_rl_moe.distributed.stored_rows import StoredRows
from nemo_rl_moe.models.megatron.layers import key_choice
from nemo_rl_moe.routing.replay import ROUTED_EXPERTS, UNKNOWN
from nemo_rl_moe.runs.folder.artifacts import ROUTING
from tests.support.family_models import FAMILY_MODELS
from tests.support.family_parity import LAYOUTS
from tests.support.family_reference import read_model, trainer_of, write_reference
from tests.support.gloo_ranks import run_ranks
from tests.support.indexers import MODELS, TOPK, Generated, choosing, generate, layers_of, policy_of, with_positions
from tests.support.quick_list import full, listed
from tests.support.tiny_model import forget_recorded_losses, layout, parallel_job, shard_of_rank


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Return the folder of a model, written once."""
    found: dict[str, str] = {}

    def of_model(name: str) -> str:
        if name not in found:
            found[name] = str(tmp_path_factory.mktemp(name))
            run_ranks(write_reference, 1, name, Path(found[name]))
        return found[name]

    return of_model


def chosen_by_transformers(folder: str, sequences: list[list[int]]) -> list[list[Tensor]]:
    """Run on one rank: for each sequence, what each indexer of transformers chooses, `[tokens, k]`."""
    model, found = read_model(Path(folder)), []
    for token_ids in sequences:
        seen: list[Tensor] = []
        with torch.no_grad(), choosing(model, None, seen):
            model(torch.tensor([token_ids]), use_cache=False)
        found.append([chosen[0] for chosen in seen])
    return found


@pytest.mark.parametrize(
    ("name", "where"),
    listed(
        ((name, where) for where, chosen in LAYOUTS.items() for name in MODELS if chosen.holds(FAMILY_MODELS[name])),
        quick=[("deepseek_v32_sparse", "one_rank")],
        in_full=[
            ("glm_moe_dsa_sparse", "one_rank_local"),
            ("glm_moe_dsa_sparse", "pp2_ep2"),
            ("deepseek_v32_sparse", "tp2"),
        ],
    ),
)
def test_generation_captures_what_transformers_chooses(name: str, where: str, folders: Callable[[str], str]) -> None:
    folder, chosen = folders(name), LAYOUTS[where]
    policy = policy_of(chosen.world_size, layer_spec=chosen.layer_spec, **layout(**chosen.sizes))
    ranks = run_ranks(generate, chosen.world_size, folder, policy)
    sequences = next(rank for rank in ranks if rank)
    assert len({len(sequence.token_ids) for sequence in sequences}) > 1, "some end before others"
    token_ids = [sequence.token_ids for sequence in sequences]
    (expected,) = run_ranks(chosen_by_transformers, 1, folder, token_ids)
    for sequence, of_layers in zip(sequences, expected, strict=True):
        assert sequence.positions.shape == (len(sequence.token_ids) - 1, len(layers_of(name)), TOPK)
        for token, rows in enumerate(sequence.positions):
            for row, theirs in zip(rows, of_layers, strict=True):
                seen = [position for position in row.tolist() if position != UNKNOWN]
                assert seen == sorted(place for place in theirs[token].tolist() if place <= token)


def generate_in_blocks(folder: str, policy: PolicyConfig) -> list[Generated]:
    """Run on every rank: `generate`, with the scores of few queries at a time."""
    with mock.patch.object(key_choice, "_MOST_PRODUCTS", 1):
        return generate(folder, policy)


@pytest.mark.parametrize("layer_spec", ["auto", full("local")])
def test_blocks_of_queries_choose_as_all_at_once(layer_spec: str, folders: Callable[[str], str]) -> None:
    folder, policy = folders("glm_moe_dsa_sparse"), policy_of(layer_spec=layer_spec)
    (at_once,), (in_blocks,) = (run_ranks(run, 1, folder, policy) for run in (generate, generate_in_blocks))
    for one, other in zip(at_once, in_blocks, strict=True):
        assert one.token_ids == other.token_ids
        assert np.array_equal(one.positions, other.positions)


def next_tokens(rows: list[np.ndarray], lengths: list[int]) -> list[np.ndarray]:
    return [np.concatenate([each[1:], each[-1:]]) for each in rows]


def tokens_before(rows: list[np.ndarray], lengths: list[int]) -> list[np.ndarray]:
    return [np.concatenate([each[:1], each[:-1]]) for each in rows]


def other_samples(rows: list[np.ndarray], lengths: list[int]) -> list[np.ndarray]:
    found = []
    for own, other in zip(rows, [*rows[1:], rows[0]], strict=True):
        size = min(len(own), len(other))
        found.append(np.concatenate([other[:size], np.full_like(own[size:], UNKNOWN)]))
    return found


def from_the_batchs_start(rows: list[np.ndarray], lengths: list[int]) -> list[np.ndarray]:
    starts = np.cumsum([0, *lengths[:-1]])
    return [np.where(each == UNKNOWN, each, each + start) for each, start in zip(rows, starts, strict=True)]


def of_older_weights(rows: list[np.ndarray], lengths: list[int]) -> list[np.ndarray]:
    """Return positions as weights that have nothing in common choose them."""
    generator = np.random.default_rng(2)
    found = [each.copy() for each in rows]
    for each in found:
        for token in range(TOPK, len(each)):
            for layer in range(each.shape[1]):
                each[token, layer] = np.sort(generator.permutation(token + 1)[:TOPK])
    return found


def twice(rows: list[np.ndarray], lengths: list[int]) -> list[np.ndarray]:
    return [np.concatenate([each[..., :1], each[..., :1], each[..., 2:]], -1) for each in rows]


FAULTS = {
    "next tokens": (next_tokens, "rows of the indexer name positions after their token"),
    "tokens before": (tokens_before, "rows of the indexer name fewer positions than their token can attend to"),
    "other samples": (other_samples, "the indexers of rollout and training have"),
    "batch's start": (from_the_batchs_start, "they count from the batch's start"),
    "stale": (of_older_weights, "the indexers of rollout and training have"),
    "twice": (twice, "rows of the indexer name a position twice"),
}


@dataclass(frozen=True)
class Reported:
    """Of the first rank: metrics, and texts of anomalies; and the largest difference of generation and training."""

    metrics: dict[str, float]
    anomalies: list[tuple[str, str]]
    difference: float = 0.0


def batch_of(sequences: list[Generated], rows: list[np.ndarray]) -> TokenBatch:
    lengths = torch.tensor([len(each.token_ids) for each in sequences])
    input_ids = torch.zeros(len(sequences), int(lengths.max()), dtype=torch.long)
    mask = torch.zeros_like(input_ids, dtype=torch.bool)
    for row, each in enumerate(sequences):
        input_ids[row, : lengths[row]] = torch.tensor(each.token_ids)
        mask[row, : lengths[row]] = torch.from_numpy(each.logprobs != 0)
    batch = TokenBatch(input_ids, lengths, mask, tuple(f"sample {row}" for row in range(len(sequences))))
    experts = stored_per_token([StoredRows.of(each.experts) for each in sequences], fill=UNKNOWN)
    assert experts is not None
    return with_positions(batch.with_stored(ROUTED_EXPERTS, experts), rows)


def report(folder: str, policy: PolicyConfig, sequences: list[Generated], faults: list[str]) -> dict[str, Reported]:
    """Run on every rank: trains on captured rows, right ones and with each fault."""
    found = {}
    with parallel_job(policy):
        for fault in ("none", *faults):
            forget_recorded_losses()
            trainer = trainer_of(Path(folder), policy)
            place = trainer.coordinates
            rows, lengths = [each.positions for each in sequences], [len(each.token_ids) for each in sequences]
            batch = batch_of(sequences, rows if fault == "none" else FAULTS[fault][0](rows, lengths))
            shard = shard_of_rank(batch, place.data_parallel_rank, place.data_parallel_size, ((0, 1), (2, 3)))
            difference = 0.0
            if fault == "none" and place.data_parallel_size == 1:
                of_training = trainer.logprobs(shard.microbatches)
                values = [row for of_microbatch in of_training for row in of_microbatch]
                for each, row in zip(sequences, values, strict=False):
                    sampled = each.logprobs != 0
                    gap = np.abs(row[: len(sampled)].numpy() - each.logprobs)[sampled]
                    difference = max(difference, float(gap.max()))
            result = trainer.train([shard], sft_loss)
            of_routes = ROUTING.of(result.artifacts)
            anomalies = [] if of_routes is None else [(each.kind, each.text) for each in of_routes.anomalies]
            found[fault] = Reported(result.moe_metrics, anomalies, difference)
    return found


@pytest.mark.parametrize(
    ("name", "where", "faults"),
    [
        ("glm_moe_dsa_sparse", "one_rank", list(FAULTS)),
        full("deepseek_v32_sparse", "pp2_ep2", ["next tokens", "batch's start"]),
        full("deepseek_v32_sparse", "tp2", ["stale"]),
        full("glm_moe_dsa_sparse", "dp2", ["other samples"]),
    ],
)
def test_right_positions_agree_and_wrong_ones_are_named(
    name: str, where: str, faults: list[str], folders: Callable[[str], str]
) -> None:
    folder, chosen = folders(name), LAYOUTS[where]
    alone = policy_of(moe_per_layer_logging=True)
    (sequences,) = run_ranks(generate, 1, folder, alone)
    changes = {"moe_per_layer_logging": True, "sequence_packing__enabled": True, **layout(**chosen.sizes)}
    policy = policy_of(chosen.world_size, **changes)
    found = run_ranks(report, chosen.world_size, folder, policy, sequences, faults)[0]
    right = found.pop("none")
    assert right.anomalies == []
    assert right.difference < 1e-5
    num_rows = sum(len(each.token_ids) - 1 for each in sequences) * len(layers_of(name))
    assert {key: value for key, value in right.metrics.items() if key.startswith("indexer/")} == {
        "indexer/rows_expected": num_rows,
        "indexer/rows_usable_share": 1.0,
        "indexer/rows_missing_share": 0.0,
        "indexer/overlap": 1.0,
        "indexer/agreement": 1.0,
        **{f"indexer/overlap_layer_{layer}": 1.0 for layer in layers_of(name)},
    }
    for fault, reported in found.items():
        of_indexer = [text for kind, text in reported.anomalies if kind == "indexer"]
        assert any(FAULTS[fault][1] in text for text in of_indexer), (fault, reported.anomalies)
        assert reported.metrics["routing/anomalies"] == len(reported.anomalies)
