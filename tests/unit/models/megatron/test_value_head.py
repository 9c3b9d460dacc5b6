# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A value head: the same numbers in every layout, in checkpoints, and left out of what is exported."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.algorithms.losses.value import ValueLoss
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.distributed.batch import TokenBatch, per_token
from nemo_rl_moe.models.interfaces import Head, LossInputs, LossOutputs
from nemo_rl_moe.models.megatron.training.measurements import prefix_values
from nemo_rl_moe.models.megatron.training.trainer import MegatronModel
from nemo_rl_moe.models.megatron.weights.parameter_layout import parameter_pieces
from tests.support.gloo_ranks import run_ranks, run_ranks_with_engine
from tests.support.quick_list import full, slow
from tests.support.tiny_model import (
    layout,
    shard_of_rank,
    sharing_sequences,
    tiny_batch,
    tiny_hf_config,
    tiny_policy,
)
from tests.support.training_run import tiny_trainer
from tests.unit.models.megatron.tiny_trainers import CHUNKED, OVERLAP, PACKED, ZERO_1, shard_for

CRITIC = (Head.VALUE,)
BOTH = (Head.LOGPROBS, Head.VALUE)
NUM_STEPS = 3


class BothLosses:
    """Log-likelihood and values of one model."""

    needs = BOTH

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        likelihood, value = sft_loss(inputs), ValueLoss()(inputs)
        return LossOutputs(likelihood.loss + value.loss, value.metrics | likelihood.metrics)


LOSSES: Mapping[Collection[Head], Any] = {CRITIC: ValueLoss(0.5), BOTH: BothLosses()}


def batch_with_returns() -> TokenBatch:
    """Sequences whose returns are a function of tokens and places."""
    batch = tiny_batch(3)
    returns = torch.cos(batch.input_ids.float()) + torch.arange(batch.input_ids.shape[1]) / 10
    return batch.with_columns(returns=per_token(returns), previous_values=per_token(0.9 * returns))


@dataclass(frozen=True)
class Fitted:
    """What one rank saw in all steps."""

    losses: list[float]
    grad_norms: list[float]
    before: dict[int, np.ndarray]  # values before the first step, by sequence; of ranks that report
    after: dict[int, np.ndarray]  # and after the last one
    evaluated: float | None  # this rank's share of the mean of values; None of ranks that report nothing
    value_head: np.ndarray | None  # its weight; None of other stages
    trains_vocabulary: bool | None  # the output layer's weight has moved; None of other stages


def values_of(trainer: MegatronModel, batch: TokenBatch) -> dict[int, np.ndarray]:
    place = trainer.coordinates
    found = [row for values in trainer.measure(shard_for(trainer, batch).microbatches, prefix_values) for row in values]
    first = place.data_parallel_rank * (8 // place.data_parallel_size)
    return {row: each[: int(batch.lengths[row])].numpy() for row, each in enumerate(found, start=first)}


def piece_of(trainer: MegatronModel, name: str) -> np.ndarray | None:
    found = [piece.local for piece in parameter_pieces(trainer.chunks, trainer.config) if piece.name == name]
    return found[0].float().numpy().copy() if found else None


def fit(policy: PolicyConfig, heads: Collection[Head], save_to: str | None = None) -> Fitted:
    with tiny_trainer(policy, heads=heads) as trainer:
        batch, loss = batch_with_returns(), LOSSES[heads]
        shard = shard_for(trainer, batch)
        before, vocabulary = values_of(trainer, batch), piece_of(trainer, "output_layer.weight")
        evaluated = trainer.evaluate(shard, loss)
        results = [trainer.train([shard], loss) for _ in range(NUM_STEPS)]
        if save_to is not None:
            trainer.start_checkpoint(Path(save_to), with_optimizer=True)
            assert trainer.finish_checkpoint() is None
            results.append(trainer.train([shard], loss))
        moved = piece_of(trainer, "output_layer.weight")
        return Fitted(
            [result.global_loss for result in results],
            [result.grad_norm for result in results],
            before,
            values_of(trainer, batch),
            evaluated["value_mean"].reduce() if evaluated else None,
            piece_of(trainer, "value_head.weight"),
            None if vocabulary is None or moved is None else not np.array_equal(vocabulary, moved),
        )


@pytest.fixture(scope="module", params=[CRITIC, BOTH], ids=["values alone", "both heads"])
def expected(request: pytest.FixtureRequest) -> tuple[Collection[Head], Fitted]:
    (found,) = run_ranks(fit, 1, tiny_policy(1), request.param)
    return request.param, found


def test_values_are_the_product_with_the_head_and_they_fit(expected: tuple[Collection[Head], Fitted]) -> None:
    heads, found = expected
    batch = batch_with_returns()
    assert all(each[0] == 0 for each in found.before.values()), "nothing is chosen before the first token"
    assert found.losses[-1] < found.losses[0]
    values = np.concatenate([found.before[row][1:] for row in range(8)])
    trained = np.concatenate([batch.token_mask[row, 1 : len(found.before[row])].numpy() for row in range(8)])
    assert found.evaluated == pytest.approx(values[trained].mean(), rel=1e-5)
    assert values.std() > 0.01
    assert found.trains_vocabulary is (heads == BOTH)


@pytest.mark.parametrize(
    ("world_size", "changes"),
    [
        full(1, PACKED),
        *(full(2, changes) for changes in (layout(tp=2), layout(ep=2) | ZERO_1 | OVERLAP)),
        *(slow(2, changes) for changes in (layout(tp=2) | PACKED | CHUNKED, layout(pp=2))),
        (2, layout(pp=2, vpp=2) | PACKED | CHUNKED),
    ],
)
def test_layouts_agree(world_size: int, changes: dict[str, Any], expected: tuple[Collection[Head], Fitted]) -> None:
    heads, wanted = expected
    _agree(run_ranks(fit, world_size, tiny_policy(world_size, **changes), heads), wanted)


@pytest.mark.full
def test_ranks_that_share_sequences_agree() -> None:
    policy = tiny_policy(2, **PACKED)
    (wanted,) = run_ranks_with_engine(fit, 1, tiny_policy(1, **PACKED), CRITIC)
    _agree(run_ranks_with_engine(fit, 2, sharing_sequences(policy, 2), CRITIC), wanted)


def _agree(found: list[Fitted], wanted: Fitted) -> None:
    for rank in found:
        assert rank.losses == pytest.approx(wanted.losses, rel=1e-5)
        assert rank.grad_norms == pytest.approx(wanted.grad_norms, rel=1e-4)
        if rank.value_head is not None:
            np.testing.assert_allclose(rank.value_head, wanted.value_head, atol=2e-5)
    for name in ("before", "after"):
        rows = {row: values for rank in found for row, values in getattr(rank, name).items()}
        assert rows.keys() == getattr(wanted, name).keys()
        for row, values in rows.items():
            np.testing.assert_allclose(values, getattr(wanted, name)[row], atol=5e-5)


def go_on(policy: PolicyConfig, folder: str) -> float:
    with tiny_trainer(policy, heads=CRITIC) as trainer:
        trainer.load_checkpoint(Path(folder), with_optimizer=True)
        shard = shard_for(trainer, batch_with_returns())
        return trainer.train([shard], LOSSES[CRITIC]).global_loss


def test_it_goes_on_from_a_checkpoint_in_its_own_layout_and_another(tmp_path: Path) -> None:
    (saved,) = run_ranks(fit, 1, tiny_policy(1), CRITIC, str(tmp_path))
    assert run_ranks(go_on, 1, tiny_policy(1), str(tmp_path)) == [saved.losses[-1]]
    others = run_ranks(go_on, 2, tiny_policy(2, **layout(tp=2)), str(tmp_path))
    assert others == pytest.approx([saved.losses[-1]] * 2, rel=1e-5)


def start_from(policy: PolicyConfig, folder: str) -> tuple[list[str], list[str], Any, list[str], Any]:
    """A critic's checkpoint is read by a model without its head, and a folder without one by a critic."""
    with tiny_trainer(policy, heads=CRITIC) as critic:
        shard = shard_of_rank(batch_with_returns())
        first = piece_of(critic, "value_head.weight")
        critic.train([shard], LOSSES[CRITIC])
        left_out = critic.save_weights(Path(folder, "hf"), {})
        weights = Path(folder, "megatron", "policy")
        weights.mkdir(parents=True)
        critic.start_checkpoint(weights, with_optimizer=True)
        assert critic.finish_checkpoint() is None
        without = MegatronModel(policy, tiny_hf_config(), Path(folder, "megatron"))
        again = MegatronModel(policy, tiny_hf_config(), Path(folder, "megatron"), heads=CRITIC)
        fresh = MegatronModel(policy, tiny_hf_config(), Path(folder, "hf"), heads=CRITIC)
        trained = piece_of(critic, "value_head.weight")
        heads = {
            "again": np.array_equal(piece_of(again, "value_head.weight"), trained),  # type: ignore[arg-type]
            "fresh": np.array_equal(piece_of(fresh, "value_head.weight"), first),  # type: ignore[arg-type]
            "moved": not np.array_equal(first, trained),  # type: ignore[arg-type]
        }
        return left_out, list(without.notices), heads, list(again.notices), list(fresh.notices)


def test_what_has_no_place_for_the_head_leaves_it_out_and_reports(tmp_path: Path) -> None:
    ((left_out, without, heads, again, fresh),) = run_ranks(start_from, 1, tiny_policy(1), str(tmp_path))
    assert left_out == ["value_head.weight"]
    assert without == [f"{tmp_path}/megatron: value_head.weight left out: the model has no value head"]
    assert heads == {"again": True, "fresh": True, "moved": True}
    assert again == fresh == []
