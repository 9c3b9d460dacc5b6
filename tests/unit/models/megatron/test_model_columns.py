# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Columns for the model reach it in training, log-probability and evaluation passes, in every layout and batching.

The columns are read by hooks behind every decoder layer, so by every pipeline stage and virtual stage: what they add to
the hidden states changes each number that the model gives.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.distributed.batch import Axis, Column, Destination, TokenBatch, per_sequence, per_token
from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer
from tests.support.gloo_ranks import run_ranks
from tests.support.tiny_model import MICROBATCHES, layout, logprobs_by_sequence, shard_of_rank, tiny_batch, tiny_policy
from tests.support.training_run import tiny_trainer
from tests.unit.models.megatron.tiny_trainers import PACKED, shard_for

LENGTH_SORTED = ((0, 5), (1, 4), (2, 7), (3, 6))
"""Other microbatches, as dynamic batching makes them."""


@dataclass(frozen=True)
class Measured:
    """Numbers of one rank; None and 0 where it computes no loss."""

    logprobs: dict[int, np.ndarray]
    evaluation_loss: float
    training_loss: float
    grad_norm: float
    seen: set[str]


def batch_with_columns() -> TokenBatch:
    batch = tiny_batch(3)
    generator = torch.Generator().manual_seed(11)
    sizes = torch.arange(len(batch)) % 3
    return batch.with_columns(
        shift=per_token(torch.randn(batch.input_ids.shape, generator=generator), Destination.MODEL, fill=7.0),
        row=per_sequence(torch.arange(float(len(batch))), Destination.MODEL),
        patches=Column(torch.arange(float(sizes.sum())), Axis.RAGGED, Destination.MODEL, sizes),
        unrelated=per_token(torch.full(batch.input_ids.shape, float("nan"))),
    )


def read_columns_behind_each_layer(trainer: MegatronTrainer, seen: set[str]) -> None:
    """Adds the column `shift`, and the mean of `patches`, to what each decoder layer returns."""
    from megatron.core import parallel_state

    def hook_of(chunk: Any) -> Any:
        def add(layer: Any, args: Any, output: Any) -> Any:
            columns = chunk.model_columns
            if not columns:
                return output
            seen.update(columns)
            hidden, *rest = output
            shift = columns["shift"].T  # [columns, rows]
            if chunk.config.sequence_parallel:
                size = parallel_state.get_tensor_model_parallel_world_size()
                shift = shift.chunk(size)[parallel_state.get_tensor_model_parallel_rank()]
            assert shift.shape == hidden.shape[:2]
            return (hidden + 0.05 * shift[..., None], *rest)

        return add

    for chunk in trainer.chunks:
        for layer in chunk.decoder.layers:
            layer.register_forward_hook(hook_of(chunk))


def measure(policy: PolicyConfig, microbatches: Any, *, with_columns: bool) -> Measured:
    with tiny_trainer(policy) as trainer:
        seen: set[str] = set()
        read_columns_behind_each_layer(trainer, seen)
        whole = batch_with_columns() if with_columns else tiny_batch(3)
        shard = shard_for(trainer, whole, microbatches)
        logprobs = logprobs_by_sequence(trainer, shard, whole, microbatches)
        evaluated = trainer.evaluate(shard, sft_loss)
        result = trainer.train([shard], sft_loss)
        loss = evaluated["loss"].reduce() if "loss" in evaluated else 0.0
        return Measured(logprobs, loss, result.global_loss, result.grad_norm, seen)


def joined(runs: list[Measured]) -> tuple[dict[int, np.ndarray], float, float, float]:
    logprobs = {index: values for run in runs for index, values in run.logprobs.items()}
    by_share = {tuple(sorted(run.logprobs)): run.evaluation_loss for run in runs if run.logprobs}
    return logprobs, sum(by_share.values()), runs[0].training_loss, runs[0].grad_norm


def run(world_size: int, microbatches: Any = MICROBATCHES, *, with_columns: bool = True, **changes: Any) -> Any:
    policy = tiny_policy(world_size, **{"activation_checkpointing": "none", **changes})
    found = run_ranks(_measure, world_size, policy, microbatches, with_columns)
    assert all(one.seen == ({"shift", "row", "patches"} if with_columns else set()) for one in found)
    return joined(found)


def _measure(policy: PolicyConfig, microbatches: Any, with_columns: bool) -> Measured:
    return measure(policy, microbatches, with_columns=with_columns)


@pytest.fixture(scope="module")
def expected() -> Any:
    """Return the result of one rank, padded."""
    return run(1)


def test_the_columns_change_what_the_model_gives(expected: Any) -> None:
    without = run(1, with_columns=False)
    assert all(np.abs(expected[0][index] - without[0][index])[1:].max() > 1e-2 for index in without[0])
    assert expected[1] == pytest.approx(expected[2], rel=1e-6), "evaluation and training read the same columns"
    assert abs(expected[2] - without[2]) > 1e-2


@pytest.mark.parametrize(
    ("world_size", "changes", "microbatches"),
    [
        (1, PACKED, MICROBATCHES),
        pytest.param(1, {}, LENGTH_SORTED, marks=pytest.mark.slow),
        pytest.param(2, {}, MICROBATCHES, marks=pytest.mark.full),
        pytest.param(2, layout(tp=2), MICROBATCHES, marks=pytest.mark.slow),
        pytest.param(2, PACKED | layout(tp=2), MICROBATCHES, marks=pytest.mark.full),
        pytest.param(2, layout(ep=2), LENGTH_SORTED, marks=pytest.mark.full),
        pytest.param(2, layout(pp=2), MICROBATCHES, marks=pytest.mark.slow),
        (2, PACKED | layout(pp=2), LENGTH_SORTED),
        pytest.param(2, layout(pp=2, vpp=2), MICROBATCHES, marks=pytest.mark.full),
    ],
)
def test_in_every_layout_and_batching(
    world_size: int, changes: dict[str, Any], microbatches: Any, expected: Any
) -> None:
    logprobs, evaluation_loss, training_loss, grad_norm = run(world_size, microbatches, **changes)
    assert logprobs.keys() == expected[0].keys()
    for index, values in logprobs.items():
        np.testing.assert_allclose(values, expected[0][index], atol=2e-5)
    assert evaluation_loss == pytest.approx(expected[1], rel=1e-5)
    assert training_loss == pytest.approx(expected[2], rel=1e-5)
    if microbatches is MICROBATCHES:  # the auxiliary loss is one of each microbatch
        assert grad_norm == pytest.approx(expected[3], rel=1e-4)


def test_what_activation_checkpointing_repeats_has_no_columns() -> None:
    """A layer that reads columns from its model, and is run again in the backward pass, fails and is not wrong."""
    policy = tiny_policy(1, activation_checkpointing="full")
    (problem,) = run_ranks(_reading_in_the_backward_pass, 1, policy)
    assert "shift" in problem


def _reading_in_the_backward_pass(policy: PolicyConfig) -> str:
    with tiny_trainer(policy) as trainer:
        (chunk,) = trainer.chunks

        def read(layer: Any, args: Any, output: Any) -> Any:
            return (output[0] + 0 * chunk.model_columns["shift"].T[..., None], *output[1:])

        chunk.decoder.layers[0].register_forward_hook(read)
        try:
            trainer.train([shard_of_rank(batch_with_columns())], sft_loss)
        except KeyError as error:
            return str(error)
        return "nothing was wrong"
