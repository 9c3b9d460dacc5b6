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
from tests.support.quick_list import slow
from tests.support.tiny_model import layout, tiny_policy
from tests.support.training_run import RunSettings
from tests.unit.models.megatron.tiny_trainers import ZERO_1

SAVE_AFTER, NUM_STEPS = 1, 3


def settings_of(model: str, world_size: int, **changes: Any) -> RunSettings:
    """Return a run on tokens that the model has."""
    vocabulary_size = FAMILY_MODELS[model].hf_config().vocab_size
    return RunSettings(tiny_policy(world_size, **changes), model=model, batch={"vocabulary_size": vocabulary_size})


ONE_RANK: tuple[int, dict[str, Any]] = (1, {})
LOCAL = {"layer_spec": "local"}
LATENT = (1e-6, 1e-5)
TOLERANCES = {"gpt_oss": (2e-6, 2e-6), "deepseek_v3": LATENT, "deepseek_v3_moonlight": LATENT}
"""Of losses and gradient norms."""
MOVED_BIAS = {"moe_router_bias_update_rate": 0.05}


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "writer", "reader"),
    [
        # Norms of all heads: every rank holds the weights of all.
        ("olmoe", (2, layout(tp=2)), ONE_RANK),
        # A gate that tensor parallelism leaves whole, beside a shared expert that it cuts; biases of queries and keys.
        slow("qwen2_moe", (2, layout(tp=2)), ONE_RANK),
        slow("glm4_moe", (2, layout(tp=2)), ONE_RANK),
        slow("glm4_moe_lite", (2, layout(pp=2, vpp=2)), ONE_RANK),
        slow("minimax_m2", (2, layout(tp=2)), ONE_RANK),
        slow("kimi_k2", (2, layout(ep=2)), ONE_RANK),
        slow("glm_moe_dsa", (2, layout(pp=2)), ONE_RANK),
        # Sections of rows that tensor parallelism cuts each.
        ("qwen3_next", (2, layout(tp=2)), ONE_RANK),
        slow("qwen3_5_moe_text", (2, layout(pp=2, vpp=2)), ONE_RANK),
        ("nemotron_h", (2, layout(tp=2)), ONE_RANK),
        slow("nemotron_h", (2, layout(pp=2, vpp=2)), (2, layout(ep=2))),
        slow("qwen3_5_text", (2, layout(tp=2)), ONE_RANK),
        slow("qwen2_yarn_positions", (2, layout(pp=2)), ONE_RANK),
        slow("gpt_oss", (2, layout(tp=2)), (2, layout(ep=2) | LOCAL)),
        slow("gpt_oss", (1, LOCAL), (2, layout(tp=2))),
        slow("gpt_oss", (2, layout(ep=2) | ZERO_1), (2, layout(pp=2) | ZERO_1)),
        # Latents, groups and a bias of experts that moves.
        ("deepseek_v3", (2, layout(tp=2) | MOVED_BIAS), (4, layout(pp=2, ep=2) | MOVED_BIAS)),
        slow("deepseek_v3", (4, layout(pp=2, ep=2) | MOVED_BIAS), (2, layout(tp=2) | MOVED_BIAS)),
        slow("deepseek_v3_moonlight", (2, layout(ep=2)), (2, layout(tp=2))),
    ],
)
def test_another_layout_goes_on_where_one_stopped(model: str, writer: Any, reader: Any, tmp_path: Path) -> None:
    (num_writers, changes), (num_readers, other_changes) = writer, reader
    arguments = str(tmp_path), SAVE_AFTER, NUM_STEPS
    written = run_ranks(train_and_save, num_writers, settings_of(model, num_writers, **changes), *arguments)[0]
    found = run_ranks(load_and_train, num_readers, settings_of(model, num_readers, **other_changes), *arguments)[0]
    of_loss, of_norm = TOLERANCES.get(model, (5e-6, 5e-6))
    for step, expected in zip(found, written[SAVE_AFTER:], strict=True):
        assert step["loss"] == pytest.approx(expected["loss"], rel=of_loss)
        assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=of_norm)


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "writer", "reader"),
    [
        # Norms of queries and keys, groups of experts, biases of projections and of experts; a stage without experts.
        ("glm4_moe_norms_groups", {"tp": 2}, {"pp": 2}),
        # Latents whose norms all ranks hold, groups of experts, and an indexer that no rank trains.
        ("deepseek_v32", {"tp": 2}, {"ep": 2}),
        slow("glm4_moe_norms_groups", {"ep": 2}, {"tp": 2}),
        slow("glm4_moe_norms_groups", {"pp": 2, "vpp": 2}, {"ep": 2}),
        slow("deepseek_v32", {"pp": 2}, {"tp": 2}),
        slow("deepseek_v3", {"ep": 2}, {"pp": 2}),
        slow("glm_moe_dsa", {"tp": 2}, {"ep": 2}),
        slow("glm_moe_dsa", {"tp": 2}, {"pp": 2}),
        slow("glm4_moe_lite", {"tp": 2}, {"pp": 2}),
        slow("minimax_m2", {"tp": 2}, {"ep": 2}),
        slow("kimi_k2", {"pp": 2}, {"tp": 2}),
        slow("qwen3_next", {"tp": 2}, {"pp": 2}),
        slow("qwen3_5_moe_text", {"tp": 2}, {"ep": 2}),
        ("nemotron_h", {"tp": 2}, {"pp": 2}),
        slow("qwen3_5_text", {"pp": 2}, {"tp": 2}),
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
