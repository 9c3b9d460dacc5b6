# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Modules that few families have go through a checkpoint, and into another layout."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoint_run import load_and_export, load_and_train, save_and_export, train_and_save
from tests.support.family_models import FAMILY_MODELS
from tests.support.family_reference import assert_same_tensors, tensors_in
from tests.support.gloo_ranks import run_ranks
from tests.support.tiny_model import layout, tiny_policy
from tests.support.training_run import RunSettings

SAVE_AFTER, NUM_STEPS = 1, 3


def settings_of(model: str, world_size: int, **changes: Any) -> RunSettings:
    """Return a run on tokens that the model has."""
    vocabulary_size = FAMILY_MODELS[model].hf_config().vocab_size
    return RunSettings(tiny_policy(world_size, **changes), model=model, batch={"vocabulary_size": vocabulary_size})


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        # Norms of all heads: every rank holds the weights of all.
        ("olmoe", {"tp": 2}),
        # A gate that tensor parallelism leaves whole, beside a shared expert that it cuts; biases of queries and keys.
        pytest.param("qwen2_moe", {"tp": 2}, marks=pytest.mark.slow),
        pytest.param("glm4_moe", {"tp": 2}, marks=pytest.mark.slow),
        pytest.param("glm4_moe_lite", {"pp": 2, "vpp": 2}, marks=pytest.mark.slow),
        pytest.param("minimax_m2", {"tp": 2}, marks=pytest.mark.slow),
        pytest.param("kimi_k2", {"ep": 2}, marks=pytest.mark.slow),
        pytest.param("glm_moe_dsa", {"pp": 2}, marks=pytest.mark.slow),
        # Sections of rows that tensor parallelism cuts each.
        ("qwen3_next", {"tp": 2}),
        pytest.param("qwen3_5_moe_text", {"pp": 2, "vpp": 2}, marks=pytest.mark.slow),
        pytest.param("qwen3_5_text", {"tp": 2}, marks=pytest.mark.slow),
        pytest.param("qwen2_yarn_positions", {"pp": 2}, marks=pytest.mark.slow),
    ],
)
def test_one_rank_goes_on_where_two_stopped(model: str, sizes: dict[str, int], tmp_path: Path) -> None:
    writer = settings_of(model, 2, **layout(**sizes))
    written = run_ranks(train_and_save, 2, writer, str(tmp_path), SAVE_AFTER, NUM_STEPS)[0]
    reader = settings_of(model, 1)
    (found,) = run_ranks(load_and_train, 1, reader, str(tmp_path), SAVE_AFTER, NUM_STEPS)
    for step, expected in zip(found, written[SAVE_AFTER:], strict=True):
        assert step["loss"] == pytest.approx(expected["loss"], rel=5e-6)
        assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=5e-6)


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "writer", "reader"),
    [
        # Norms of queries and keys, groups of experts, biases of projections and of experts; a stage without experts.
        ("glm4_moe_norms_groups", {"tp": 2}, {"pp": 2}),
        # Latents whose norms all ranks hold, groups of experts, and an indexer that no rank trains.
        ("deepseek_v32", {"tp": 2}, {"ep": 2}),
        pytest.param("glm4_moe_norms_groups", {"ep": 2}, {"tp": 2}, marks=pytest.mark.slow),
        pytest.param("glm4_moe_norms_groups", {"pp": 2, "vpp": 2}, {"ep": 2}, marks=pytest.mark.slow),
        pytest.param("deepseek_v32", {"pp": 2}, {"tp": 2}, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", {"ep": 2}, {"pp": 2}, marks=pytest.mark.slow),
        pytest.param("glm_moe_dsa", {"tp": 2}, {"ep": 2}, marks=pytest.mark.slow),
        pytest.param("glm_moe_dsa", {"tp": 2}, {"pp": 2}, marks=pytest.mark.slow),
        pytest.param("glm4_moe_lite", {"tp": 2}, {"pp": 2}, marks=pytest.mark.slow),
        pytest.param("minimax_m2", {"tp": 2}, {"ep": 2}, marks=pytest.mark.slow),
        pytest.param("kimi_k2", {"pp": 2}, {"tp": 2}, marks=pytest.mark.slow),
        pytest.param("qwen3_next", {"tp": 2}, {"pp": 2}, marks=pytest.mark.slow),
        pytest.param("qwen3_5_moe_text", {"tp": 2}, {"ep": 2}, marks=pytest.mark.slow),
        pytest.param("qwen3_5_text", {"pp": 2}, {"tp": 2}, marks=pytest.mark.slow),
    ],
)
def test_another_layout_has_the_same_bits(
    model: str, writer: dict[str, int], reader: dict[str, int], tmp_path: Path
) -> None:
    changes = {}
    if "moe_router_enable_expert_bias" in FAMILY_MODELS[model].router_fields:
        changes["moe_router_bias_update_rate"] = 0.02
    (tmp_path / "checkpoint").mkdir()
    for work, sizes, exported in ((save_and_export, writer, "written"), (load_and_export, reader, "read")):
        settings = settings_of(model, 2, **layout(**sizes), **changes)
        run_ranks(work, 2, settings, str(tmp_path / "checkpoint"), str(tmp_path / exported))
    assert_same_tensors(tmp_path / "read", tmp_path / "written")
    biases = [each for name, each in tensors_in(tmp_path / "read").items() if name.endswith("e_score_correction_bias")]
    assert bool(biases) == bool(changes)
    assert all(bool(torch.any(each != 0)) for each in biases), "they have moved"
