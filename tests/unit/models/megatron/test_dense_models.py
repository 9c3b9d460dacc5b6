# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A dense model in other layouts, and what asks for experts where there are none."""

from pathlib import Path

import numpy as np
import pytest

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.megatron.model.transformer_config import build_transformer_config, effective_moe_configuration
from tests.support.family_reference import trainer_of, write_reference
from tests.support.gloo_ranks import run_ranks
from tests.support.tiny_model import layout, parallel_job, tiny_batch, tiny_dense_hf_config, tiny_policy
from tests.unit.models.megatron.tiny_trainers import shard_for


def train(folder: str, policy: PolicyConfig) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of two steps with all MoE metrics on."""
    with parallel_job(policy):
        trainer = trainer_of(Path(folder), policy, num_steps=5)
        shard = shard_for(trainer, tiny_batch(11, 61))
        results = [trainer.train([shard], sft_loss) for _ in range(2)]
        assert all(result.moe_metrics == {} and not result.artifacts for result in results)
        return [result.global_loss for result in results], [result.grad_norm for result in results]


def test_layouts_train_alike_and_have_no_metrics_of_experts(tmp_path: Path) -> None:
    run_ranks(write_reference, 1, "qwen3_tied", tmp_path)
    layouts: list[tuple[int, dict[str, int]]] = [(1, {}), (2, {}), (2, {"tp": 2}), (2, {"pp": 2})]
    steps = []
    for world_size, sizes in layouts:
        policy = tiny_policy(world_size, moe_per_layer_logging=True, **layout(**sizes))
        steps += run_ranks(train, world_size, str(tmp_path), policy)
    losses, norms = (np.array(values) for values in zip(*steps, strict=True))
    assert (losses[:, 1] < losses[:, 0]).all()
    np.testing.assert_allclose(losses, losses[:1].repeat(len(losses), 0), rtol=1e-5)
    np.testing.assert_allclose(norms, norms[:1].repeat(len(norms), 0), rtol=1e-4)


def test_moe_fields_have_no_effect() -> None:
    chosen = {
        "moe_aux_loss_coeff": 0.5,
        "moe_z_loss_coeff": 0.1,
        "moe_expert_capacity_factor": 1.0,
        "moe_grouped_gemm": True,
        "moe_router_enable_expert_bias": True,
        "moe_router_force_load_balancing": True,
        "moe_shared_expert_intermediate_size": 16,
    }
    plain = build_transformer_config(tiny_policy(1), tiny_dense_hf_config())
    config = build_transformer_config(tiny_policy(1, **chosen), tiny_dense_hf_config())
    assert vars(config).keys() == vars(plain).keys()
    assert all(getattr(config, name) == getattr(plain, name) for name in chosen)
    assert config.num_moe_experts is None
    assert effective_moe_configuration(config) == {}


def test_settings_that_need_experts_are_named() -> None:
    policy = tiny_policy(2, **layout(ep=2), moe_router_force_hot_rank=1, activation_checkpointing="moe")
    with pytest.raises(ConfigurationError) as caught:
        build_transformer_config(policy, tiny_dense_hf_config())
    key = "policy.megatron_cfg."
    assert caught.value.problems == [
        f"{key}expert_model_parallel_size: got 2, expected 1: the model has no experts",
        f"{key}moe_router_force_hot_rank: got 1, expected null: the model has no experts",
        f"{key}activation_checkpointing: got 'moe', expected none or full: the model has no experts",
    ]
