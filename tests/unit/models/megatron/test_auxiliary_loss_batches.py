# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Balancing losses, whatever microbatches and layers they come from: what Megatron-Core has had wrong."""

import pytest
import torch

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.distributed.batch import make_shard
from nemo_rl_moe.models.megatron.moe_metrics import get_moe_metrics
from tests.support.gloo_ranks import run_ranks
from tests.support.recorded_losses import record_auxiliary_loss
from tests.support.tiny_model import parallel_job, tiny_batch, tiny_policy
from tests.support.training_run import RunSettings, build_trainer


def gradient_norms(policy: PolicyConfig) -> list[float]:
    """Of four times the same sequence: one, two and four in a microbatch."""
    norms = []
    for size in (1, 2, 4):
        with parallel_job(policy):
            trainer = build_trainer(RunSettings(policy))
            batch = tiny_batch(100).select([0] * 4)
            microbatches = [list(range(first, first + size)) for first in range(0, 4, size)]
            norms.append(trainer.train([make_shard(batch, microbatches, batch)], sft_loss).grad_norm)
    return norms


@pytest.mark.full
@pytest.mark.parametrize("kind", ["seq_aux_loss", "aux_loss"])
def test_the_sequence_loss_does_not_depend_on_the_microbatch_size(kind: str) -> None:
    policy = tiny_policy(
        1, layer_spec="local", moe_router_load_balancing_type=kind, moe_aux_loss_coeff=10.0, max_grad_norm=None
    )
    (norms,) = run_ranks(gradient_norms, 1, policy)
    assert norms[1:] == pytest.approx([norms[0]] * 2, rel=1e-4)
    (without,) = run_ranks(gradient_norms, 1, tiny_policy(1, layer_spec="local", max_grad_norm=None))
    assert abs(norms[0] / without[0] - 1) > 0.05


def average_of_one_layer(policy: PolicyConfig) -> dict[str, float]:
    with parallel_job(policy):
        record_auxiliary_loss("load_balancing_loss", torch.tensor(1.5), 3, 4)
        return get_moe_metrics(1.0, device=torch.device("cpu"))


def test_the_average_is_over_layers_that_recorded_a_loss() -> None:
    assert run_ranks(average_of_one_layer, 1, tiny_policy(1, layer_spec="local")) == [{"load_balancing_loss": 1.5}]
