# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Dropout of adapters: other inputs are dropped on other shares of a batch, the same ones of the same inputs."""

from typing import Any

import pytest
import torch

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.models.megatron.lora import adapter as adapter_module
from tests.support.gloo_ranks import run_ranks
from tests.support.lora_models import lora
from tests.support.tiny_model import layout, tiny_batch, tiny_policy
from tests.support.training_run import tiny_trainer
from tests.unit.models.megatron.tiny_trainers import shard_for


def masks(policy: Any, without_sequence_parallelism: bool) -> list[bytes]:
    """What each dropout of a step leaves, on ranks whose sequences have the same lengths."""
    with tiny_trainer(policy) as trainer:
        if without_sequence_parallelism:
            return [dropped(policy, trainer, cut) for cut in (adapter_module.OUTPUTS, adapter_module.INPUTS)]
        found: list[bytes] = []
        plain = adapter_module.F.dropout

        def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
            kept = plain(torch.ones_like(input), p, training)
            if p and training:
                found.append((kept > 0).numpy().tobytes())
            return input * kept

        adapter_module.F.dropout = dropout
        try:
            batch = tiny_batch(0, shortest=17, longest=17)
            trainer.train([shard_for(trainer, batch)], sft_loss)
        finally:
            adapter_module.F.dropout = plain
        return found


def dropped(policy: Any, trainer: Any, cut: int) -> bytes:
    """What an adapter of a layer with such a cut leaves of the same inputs, as in a pass without a cut sequence."""
    adapters = adapter_module.adapters_in(trainer.chunks)
    chosen = next(each for each in adapters if each.base.cut == cut and each.base.experts is None)
    trainer.config.sequence_parallel = False
    chosen.train()
    kept: bytes = (chosen._dropped(torch.ones(64, 8)) > 0).numpy().tobytes()
    return kept


@pytest.mark.parametrize("experts", ["none", pytest.param("per_expert", marks=pytest.mark.full)])
def test_no_two_shares_of_a_batch_drop_the_same(experts: str) -> None:
    targets = ("q_proj", "o_proj") if experts == "none" else ("all-linear",)
    policy = tiny_policy(2, **lora(experts, targets, dropout=0.5))
    first, second = run_ranks(masks, 2, policy, False)
    # What is recomputed in the backward pass drops the same once more.
    assert len(set(first)) == len(set(second)) >= 16
    assert not set(first) & set(second)


def test_tensor_parallel_ranks_drop_the_same_of_the_same_inputs() -> None:
    """Of a layer whose outputs they share all have the same inputs; of one whose inputs they share, their own."""
    policy = tiny_policy(2, **layout(tp=2), **lora("none", ("q_proj", "o_proj"), dropout=0.5))
    (outputs, inputs), (other_outputs, other_inputs) = run_ranks(masks, 2, policy, True)
    assert outputs == other_outputs
    assert inputs != other_inputs
