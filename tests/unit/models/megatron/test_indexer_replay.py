# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Replay of random positions of indexers, in every layout: a pass that did not replay would give other numbers."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.distributed.batch import TokenBatch
from nemo_rl_moe.models.megatron.training import indexer_hooks
from nemo_rl_moe.routing.replay import UNKNOWN
from tests.support.family_models import FAMILY_MODELS
from tests.support.family_parity import LAYOUTS
from tests.support.family_reference import read_model, trainer_of, write_reference
from tests.support.gloo_ranks import run_ranks
from tests.support.indexers import MODELS, TOPK, choosing, layers_of, policy_of, with_positions
from tests.support.quick_list import listed
from tests.support.tiny_model import layout, parallel_job, shard_of_rank, tiny_batch


def random_positions(batch: TokenBatch, num_layers: int, seed: int = 7) -> list[np.ndarray]:
    """Return positions of each sequence's tokens but the last, `[tokens, layers, k]`, that no indexer would choose."""
    generator = np.random.default_rng(seed)
    found = []
    for length in batch.lengths.tolist():
        rows = np.full((length - 1, num_layers, TOPK), UNKNOWN, dtype=np.int32)
        for token in range(length - 1):
            count = min(token + 1, TOPK)
            for layer in range(num_layers):
                rows[token, layer, :count] = generator.permutation(token + 1)[:count]
        found.append(rows)
    return found


def expected_training(folder: str, name: str) -> tuple[list[np.ndarray], float, float]:
    """Run on one rank: writes a model, and returns transformers' log-probabilities, loss and norm of the gradient with
    random positions.
    """
    write_reference(name, Path(folder))
    model = read_model(Path(folder))
    batch = tiny_batch(3, model.config.vocab_size)
    found, loss = [], torch.zeros(())
    count = int(batch.token_mask[:, 1:].sum())
    for row, rows in enumerate(random_positions(batch, len(layers_of(name)))):
        ids = batch.input_ids[row : row + 1, : int(batch.lengths[row])]
        with choosing(model, rows):
            logprobs = model(ids, use_cache=False).logits[:, :-1].log_softmax(-1)
        of_tokens = logprobs.gather(-1, ids[:, 1:, None])[0, :, 0]
        found.append(of_tokens.detach().numpy())
        loss = loss - of_tokens[batch.token_mask[row, 1 : ids.shape[1]]].sum() / count
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return found, loss.item(), torch.nn.utils.get_total_norm(gradients).item()


@dataclass(frozen=True)
class Trained:
    """Of one rank: log-probabilities by sequence, loss and norm of the gradient."""

    logprobs: list[np.ndarray]
    loss: float
    grad_norm: float


def train(folder: str, name: str, policy: PolicyConfig) -> Trained:
    """Run on every rank: trains with random positions, after a pass for log-probabilities."""
    with parallel_job(policy):
        trainer = trainer_of(Path(folder), policy)
        place = trainer.coordinates
        batch = tiny_batch(3, trainer.hf_config.vocab_size)
        batch = with_positions(batch, random_positions(batch, len(layers_of(name))))
        shard = shard_of_rank(batch, place.data_parallel_rank, place.data_parallel_size)
        logprobs = [
            found[: int(length) - 1].numpy()
            for values, of_microbatch in zip(trainer.logprobs(shard.microbatches), shard.microbatches, strict=False)
            for found, length in zip(values[:, 1:], of_microbatch.lengths, strict=False)
        ]
        result = trainer.train([shard], sft_loss)
        return Trained(logprobs, result.global_loss, result.grad_norm)


HOW = ("padded", "packed", "recomputed")


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Return transformers' results of a model, computed once, with the model's folder."""
    found: dict[str, Any] = {}

    def of_model(name: str) -> Any:
        if name not in found:
            folder = str(tmp_path_factory.mktemp(name))
            found[name] = (folder, *run_ranks(expected_training, 1, folder, name)[0])
        return found[name]

    return of_model


@pytest.mark.parametrize(
    ("name", "where", "how"),
    listed(
        (
            (name, where, how)
            for where, chosen in LAYOUTS.items()
            for name in MODELS
            for how in HOW
            if chosen.holds(FAMILY_MODELS[name]) and (how != "packed" or chosen.layer_spec != "local")
        ),
        quick=[("glm_moe_dsa_sparse", "one_rank", "recomputed")],
        in_full=[
            ("deepseek_v32_sparse", "tp2_ep2_pp2", "packed"),
            ("glm_moe_dsa_sparse", "tp2_ep2_pp2", "recomputed"),
            ("deepseek_v32_sparse", "dp2", "padded"),
        ],
    ),
)
def test_given_positions_are_replayed_as_in_transformers(
    name: str, where: str, how: str, references: Callable[[str], Any]
) -> None:
    folder, logprobs, loss, grad_norm = references(name)
    chosen = LAYOUTS[where]
    changes: dict[str, Any] = {"sequence_packing__enabled": how == "packed", **layout(**chosen.sizes)}
    changes["activation_checkpointing"] = "full" if how == "recomputed" else "none"
    policy = policy_of(chosen.world_size, layer_spec=chosen.layer_spec, **changes)
    ranks = run_ranks(train, chosen.world_size, folder, name, policy)
    found = [values for rank in ranks for values in rank.logprobs]
    # Ranks that share sequences return the same.
    of_sequences = found if len(found) <= len(logprobs) else found[: len(logprobs)]
    assert len(of_sequences) == len(logprobs)
    difference = max(np.abs(mine - theirs).max() for mine, theirs in zip(of_sequences, logprobs, strict=True))
    print(f"{name}, {where}, {how}: {difference:.1e}, {ranks[0].grad_norm / grad_norm - 1:.1e}")
    assert difference < 1e-4
    assert ranks[0].loss == pytest.approx(loss, rel=1e-5)
    assert ranks[0].grad_norm == pytest.approx(grad_norm, rel=1e-4)


def lengths_of_comparisons(folder: str, name: str, policy: PolicyConfig) -> list[int]:
    """Run on one rank: the number of positions that each comparison of rollout and training tells apart."""
    with mock.patch.object(indexer_hooks, "num_common", wraps=indexer_hooks.num_common) as compared:
        train(folder, name, policy)
    return [call.args[2] for call in compared.call_args_list]


def test_a_comparison_takes_memory_for_the_longest_sequence_of_a_pack(references: Callable[[str], Any]) -> None:
    name = "glm_moe_dsa_sparse"
    policy = policy_of(sequence_packing__enabled=True)
    (found,) = run_ranks(lengths_of_comparisons, 1, references(name)[0], name, policy)
    longest = int(tiny_batch(3).lengths.max())
    assert found
    assert max(found) <= longest
