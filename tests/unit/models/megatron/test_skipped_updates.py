# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""An update whose loss or gradient is NaN or infinite is left out, by all ranks, and leaves no trace."""

import math
from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest
import torch

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.models.interfaces import LossInputs, LossOutputs
from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer
from tests.support.gloo_ranks import run_ranks
from tests.support.quick_list import full, listed, slow
from tests.support.tiny_model import layout, tiny_policy
from tests.support.training_run import RunSettings, SpoiledLoss, shard_of_step, tiny_trainer
from tests.unit.models.megatron.tiny_trainers import EXPERT_BIAS, ZERO_1

BIAS = {**EXPERT_BIAS, "moe_router_bias_update_rate": 0.05}


def run_with(settings: RunSettings, spoiled: list[Any]) -> list[tuple[Any, ...]]:
    """Trains a step with each loss function; None: the honest one. What each step reports, and the last weights."""
    with tiny_trainer(settings.policy, settings.model) as trainer:
        found: list[tuple[Any, ...]] = []
        for step, loss in enumerate(spoiled):
            before = _weights(trainer)
            result = trainer.train([shard_of_step(trainer, settings, step)], loss or sft_loss)
            changed = not torch.equal(before, _weights(trainer))
            counts = (result.num_skipped_updates, result.skipped_in_a_row, trainer.num_updates)
            found.append((result.global_loss, result.grad_norm, result.lr, changed, *counts))
        return found


def _weights(trainer: MegatronTrainer) -> torch.Tensor:
    return torch.cat([weight.detach().flatten() for chunk in trainer.chunks for weight in chunk.parameters()])


SETTINGS: dict[str, Mapping[str, Any]] = {"plain": {}, "zero": ZERO_1, "bfloat16": {"precision": "bfloat16"}}


@pytest.mark.parametrize(
    ("name", "kind"),
    listed(
        product(SETTINGS, ("loss", "gradient", "both")),
        quick=[("zero", "gradient")],
        in_full=[("plain", "loss"), ("bfloat16", "both")],
    ),
)
def test_a_spoiled_update_is_left_out(name: str, kind: str) -> None:
    found = run_ranks(run_with, 2, RunSettings(tiny_policy(2, **SETTINGS[name])), [None, SpoiledLoss(kind), None])
    assert str(found[0]) == str(found[1]), "all ranks decide alike; as text, since NaN equals nothing"
    first, second, third = found[0]
    assert [step[3] for step in found[0]] == [True, False, True]
    assert [step[4:] for step in found[0]] == [(0, 0, 1), (1, 1, 1), (0, 0, 2)]
    assert not (math.isfinite(second[0]) and math.isfinite(second[1]))
    assert second[2] == third[2] != first[2], "the schedule waits"
    assert math.isfinite(third[0])
    assert math.isfinite(third[1])


def test_a_run_with_a_spoiled_update_goes_on_as_if_that_had_never_been() -> None:
    settings = RunSettings(tiny_policy(1))
    (spoiled,) = run_ranks(run_with, 1, settings, [None, SpoiledLoss("both"), None])
    (honest,) = run_ranks(run_with, 1, settings, [None, None, None])
    assert spoiled[0] == honest[0]
    assert spoiled[2][2] == honest[1][2]
    assert spoiled[2][0] != honest[2][0]


@pytest.mark.parametrize("settings", [{}, {"precision": "bfloat16"}], ids=["float32", "bfloat16"])
def test_a_spoiled_update_leaves_the_expert_bias_alone(settings: Mapping[str, Any]) -> None:
    job = RunSettings(tiny_policy(1, **BIAS, **settings))
    (biases,) = run_ranks(expert_biases, 1, job, [SpoiledLoss("both"), None, SpoiledLoss("gradient"), None])
    first, second, third, fourth = biases
    assert set(first) == {0.0}
    assert first != second == third != fourth


def expert_biases(settings: RunSettings, losses: list[Any]) -> list[list[float]]:
    """The routers' biases after a step with each loss function; None: the honest one."""
    with tiny_trainer(settings.policy, settings.model) as trainer:
        found = []
        for step, loss in enumerate(losses):
            trainer.train([shard_of_step(trainer, settings, step)], loss or sft_loss)
            buffers = [named for chunk in trainer.chunks for named in chunk.named_buffers()]
            biases = [buffer for name, buffer in buffers if name.endswith("expert_bias")]
            found.append(torch.cat(biases).tolist())
        return found


@pytest.mark.parametrize("sizes", [slow({"ep": 2}), {"pp": 2}, full({"tp": 2})], ids=str)
def test_one_rank_s_nan_stops_the_update_on_all(sizes: Mapping[str, int]) -> None:
    settings = RunSettings(tiny_policy(2, **layout(**sizes)))
    found = run_ranks(run_with, 2, settings, [SpoiledLoss("gradient", only_width=16), None])
    assert str(found[0]) == str(found[1])
    assert [step[3:5] for step in found[0]] == [(False, 1), (True, 0)]


@pytest.mark.full
def test_several_updates_of_one_call() -> None:
    (found,) = run_ranks(updates_of_one_call, 1, RunSettings(tiny_policy(1)))
    assert found == (1, 1, 2)


def updates_of_one_call(settings: RunSettings) -> tuple[int, int, int]:
    """Three global batches, the last of which is spoiled."""
    with tiny_trainer(settings.policy, settings.model) as trainer:
        shards = [shard_of_step(trainer, settings, step) for step in range(3)]
        calls = iter([None] * 8 + [SpoiledLoss("both")] * 4)

        def loss(inputs: LossInputs) -> LossOutputs:
            return (next(calls) or sft_loss)(inputs)

        result = trainer.train(shards, loss)
        return result.num_skipped_updates, result.skipped_in_a_row, trainer.num_updates
