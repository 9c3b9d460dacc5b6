# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The reference of a model with adapters is its base: the same numbers as with a copy, and no copy is kept."""

from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer
from nemo_rl_moe.models.megatron.weights.starting_weights import ReferenceWeights
from tests.support.gloo_ranks import run_ranks
from tests.support.lora_models import lora
from tests.support.quick_list import some_of
from tests.support.tiny_model import forget_recorded_losses, layout, parallel_job, tiny_grpo_policy, tiny_hf_config
from tests.support.training_run import RunSettings, shard_of_step

Logprobs = list[Tensor]


def measured_by_each(policy: Any) -> tuple[Logprobs, Logprobs, Logprobs, Logprobs]:
    """Run on every rank: after two steps, log-probabilities of the reference, of a copy of the weights that was made at
    the start, of a model without adapters, and of the trained model."""
    settings = RunSettings(policy)
    with parallel_job(policy):
        plain = policy.model_copy(update={"lora": None})
        base = MegatronTrainer(plain, tiny_hf_config(), None, num_steps=2)
        forget_recorded_losses()
        trainer = MegatronTrainer(policy, tiny_hf_config(), None, num_steps=2, keep_reference=True)
        assert trainer.adapters is not None
        assert trainer._as_reference == trainer.adapters.off
        copy = ReferenceWeights(trainer.chunks)
        for step in range(2):
            trainer.train([shard_of_step(trainer, settings, step)], sft_loss)
        microbatches = shard_of_step(trainer, settings, 5).microbatches
        by_reference, trained = trainer.reference_logprobs(microbatches), trainer.logprobs(microbatches)
        with copy.in_place():
            by_copy = trainer.logprobs(microbatches)
        return by_reference, by_copy, base.logprobs(microbatches), trained


@pytest.mark.parametrize(
    ("world_size", "sizes"), some_of([(1, {}), (2, {"ep": 2}), (2, {"tp": 2}), (2, {"pp": 2})], 1), ids=str
)
def test_the_base_is_the_reference_to_the_bit(world_size: int, sizes: dict[str, int]) -> None:
    policy = tiny_grpo_policy(world_size, optimizer__lr=0.01, **lora("per_expert"), **layout(**sizes))
    reporting = [found for found in run_ranks(measured_by_each, world_size, policy) if found[0]]
    assert reporting
    for by_reference, by_copy, by_base, trained in reporting:
        for reference, copy, base, moved in zip(by_reference, by_copy, by_base, trained, strict=True):
            assert torch.equal(reference, copy)
            assert torch.equal(reference, base)
            assert (reference - moved).abs().max() > 1e-3
