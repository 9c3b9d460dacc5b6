# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention in training: the same in every layout, packed, recomputed, in checkpoints, in memory."""

import os
from collections.abc import Mapping
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.models.megatron.model.gpt_model import build_model_chunks
from nemo_rl_moe.models.megatron.model.transformer_config import build_transformer_config
from nemo_rl_moe.models.megatron.training.optimizer import half_precision_modules, wrap_data_parallel
from tests.support.family_models import FAMILY_MODELS
from tests.support.family_reference import tensors_in, trainer_of
from tests.support.gloo_ranks import run_ranks
from tests.support.quick_list import full, listed, slow
from tests.support.tiny_model import layout, parallel_job, tiny_policy
from tests.support.training_run import (
    Difference,
    RankRun,
    RunSettings,
    hf_config_of,
    shard_of_step,
    tiny_trainer,
    train_run,
)
from tests.unit.models.megatron.tiny_trainers import assert_within

# Largest seen over all layouts and both versions of Megatron-Core.
TOLERANCE = Difference(loss=1e-6, grad_norm=1e-5, moe_metrics=1e-5, weights=5e-5)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "v2_groups": ("deepseek_v2_groups", {"moe_router_load_balancing_type": "seq_aux_loss"}),
    "v3": ("deepseek_v3", {"moe_router_bias_update_rate": 0.05}),
    "moonlight": ("deepseek_v3_moonlight", {}),
    "v2": ("deepseek_v2", {}),
}
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "tp2": (2, {"tp": 2}),
    "ep2": (2, {"ep": 2}),
    "pp2": (2, {"pp": 2}),
    "pp2_ep2": (4, {"pp": 2, "ep": 2}),
    "tp2_ep2": (2, {"tp": 2, "ep": 2}),
}


def settings_of(model: str, world_size: int = 1, sizes: Mapping[str, int] | None = None, **changes: Any) -> RunSettings:
    name, fields = MODELS[model]
    return RunSettings(tiny_policy(world_size, **layout(**(sizes or {})), **(fields | changes)), model=name)


@cache
def one_rank(model: str) -> RankRun:
    """The run that the others are compared with; made once."""
    return run_ranks(train_run, 1, settings_of(model))[0]


def assert_same_training(runs: list[RankRun], reference: RankRun) -> None:
    assert_within(TOLERANCE, runs, reference)


@pytest.mark.parametrize(
    ("model", "chosen"), listed(product(MODELS, LAYOUTS), quick=[("v3", "pp2_ep2")], in_full=[("v3", "tp2")])
)
def test_layout_trains_as_one_rank_does(model: str, chosen: str) -> None:
    world_size, sizes = LAYOUTS[chosen]
    assert_same_training(run_ranks(train_run, world_size, settings_of(model, world_size, sizes)), one_rank(model))


def train_without_whole_projections(settings: RunSettings) -> RankRun:
    """`train_run` with Megatron-Core's projections, cut in columns."""
    with mock.patch("nemo_rl_moe.models.megatron.layers.latent_attention._DOWN_PROJECTIONS", ()):
        return train_run(settings)


@pytest.mark.full
def test_projections_cut_in_columns_lose_gradients() -> None:
    """Whole projections correct this; the test fails once Megatron-Core is corrected itself."""
    first, expected = run_ranks(train_without_whole_projections, 2, settings_of("v3", 2, {"tp": 2}))[0], one_rank("v3")
    assert first.losses[0] == pytest.approx(expected.losses[0], rel=1e-6)
    assert abs(first.grad_norms[0] - expected.grad_norms[0]) > 1e-4 * expected.grad_norms[0]


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("v3", {"sequence_packing__enabled": True}),
        slow("v3", {"activation_checkpointing": "full"}),
        full("v3", {"activation_checkpointing": "moe"}),
        slow("v3", {"layer_spec": "local"}),
        full("v2", {"layer_spec": "local"}),
        slow("v2", {"sequence_packing__enabled": True}),
    ],
)
def test_ways_to_compute_make_no_difference(model: str, changes: dict[str, Any]) -> None:
    assert_same_training(run_ranks(train_run, 1, settings_of(model, **changes)), one_rank(model))


def norms_and_biases(settings: RunSettings) -> tuple[list[float], dict[str, Any]]:
    """Epsilons of the latents' norms, and the routers' bias after training."""
    with tiny_trainer(settings.policy, settings.model) as trainer:
        trainer.train([shard_of_step(trainer, settings, 0)], sft_loss)
        modules = [module for chunk in trainer.chunks for module in chunk.named_modules()]
        eps = [module.eps for name, module in modules if name.endswith(("q_layernorm", "kv_layernorm"))]
        biases = {name: module.expert_bias.numpy() for name, module in modules if hasattr(module, "expert_bias")}
        return eps, biases


def test_bias_stays_unless_a_rate_is_set() -> None:
    for model, moves in (("moonlight", False), ("v3", True)):
        ((eps, biases),) = run_ranks(norms_and_biases, 1, settings_of(model))
        assert set(eps) == {1e-6}
        assert len(biases) == 3
        assert all(bool(bias.any()) is moves for bias in biases.values())


def router_state_in_bfloat16(settings: RunSettings) -> list[tuple[str, str, bool]]:
    """Return, for a router's buffers, name, type, and whether a number survives that bfloat16 does not have."""
    with parallel_job(settings.policy):
        hf_config = hf_config_of(settings.model)
        config = build_transformer_config(settings.policy, hf_config)
        (chunk,) = build_model_chunks(settings.policy, config, hf_config)
        buffers = {name: buffer.fill_(257.03125) for name, buffer in chunk.named_buffers() if ".1.mlp.router." in name}
        wrap_data_parallel(settings.policy, config, half_precision_modules(config, [chunk]))
        found = dict(chunk.named_buffers())
        return [(name, str(found[name].dtype), bool((found[name] == 257.03125).all())) for name in sorted(buffers)]


def test_router_state_stays_in_float32_where_weights_are_bfloat16() -> None:
    (found,) = run_ranks(router_state_in_bfloat16, 1, settings_of("v3", precision="bfloat16"))
    names = [f"decoder.layers.1.mlp.router.{name}" for name in ("expert_bias", "local_tokens_per_expert")]
    assert found == [(name, "torch.float32", True) for name in names]


def test_bfloat16_trains_and_keeps_the_bias_exact() -> None:
    (rounded,) = run_ranks(train_run, 1, settings_of("v3", precision="bfloat16"))
    assert rounded.losses == pytest.approx(one_rank("v3").losses, rel=0.01)
    biases = [values for (name, _), values in rounded.pieces.items() if name.endswith("expert_bias")]
    # Three steps of 0.05, one up or down each, with no rounding to bfloat16.
    steps = np.stack(biases) / np.float32(0.05)
    np.testing.assert_allclose(steps, np.round(steps), atol=1e-4)


def round_trip_in_bfloat16(folder: str, exported: str, policy: PolicyConfig) -> bool:
    """Writes a checkpoint as released ones are, reads it, writes it again; on rank 0, whether the tensors are equal."""
    if os.environ["RANK"] == "0":
        write_reference_in_bfloat16(Path(folder))
    with parallel_job(policy):
        dist.barrier()
        trainer_of(Path(folder), policy).save_weights(Path(exported), {})
        dist.barrier()
        return os.environ["RANK"] != "0" or same_types_and_values(tensors_in(Path(exported)), tensors_in(Path(folder)))


def write_reference_in_bfloat16(folder: Path) -> None:
    """Weights in bfloat16, and biases that bfloat16 does not have. Newer transformers make routers in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(FAMILY_MODELS["deepseek_v3"].hf_config(), dtype=torch.bfloat16)
    model.to(torch.bfloat16)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.data = torch.randn(buffer.shape)
    model.save_pretrained(folder)


def same_types_and_values(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    biases = [tensor.dtype for name, tensor in expected.items() if name.endswith("e_score_correction_bias")]
    assert biases == [torch.float32] * 3
    return found.keys() == expected.keys() and all(
        found[name].dtype == tensor.dtype and torch.equal(found[name], tensor) for name, tensor in expected.items()
    )


@pytest.mark.parametrize("chosen", ["ep2", slow("tp2"), slow("pp2")])
def test_bias_stays_in_float32_from_file_to_file(chosen: str, tmp_path: Path) -> None:
    world_size, sizes = LAYOUTS[chosen]
    policy = tiny_policy(world_size, precision="bfloat16", **layout(**sizes))
    folders = str(tmp_path / "released"), str(tmp_path / "exported")
    assert all(run_ranks(round_trip_in_bfloat16, world_size, *folders, policy))
