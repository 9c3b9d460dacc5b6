# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A checkpoint fits a model of whatever modules, and one that does not fit is refused by name."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoint_run import load_weights_alone, problems_of_loading, save_once
from tests.support.gloo_ranks import run_ranks
from tests.support.norm_names import save_under_each_name
from tests.support.tiny_model import layout, tiny_policy
from tests.support.training_run import RunSettings
from tests.unit.models.cases import full

DENSE_LAYER, MOE_LAYER = "decoder.layers.0.", "decoder.layers.1."


@pytest.mark.parametrize(
    ("settings", "own", "engine"),
    [
        (
            RunSettings(tiny_policy(), model={"mlp_only_layers": [0]}),
            {"mlp.linear_fc1.layer_norm_weight", "self_attention.linear_qkv.layer_norm_weight"},
            {"pre_mlp_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"},
        ),
        full(
            RunSettings(tiny_policy(), model="deepseek_v3"),
            {"pre_mlp_layernorm.weight", "self_attention.kv_layernorm.weight"},
            {"pre_mlp_layernorm.weight", "self_attention.linear_kv_up_proj.layer_norm_weight"},
        ),
    ],
    ids=["experts", "latent attention"],
)
def test_norms_have_one_name_and_are_found_under_others(
    settings: RunSettings, own: set[str], engine: set[str], tmp_path: Path
) -> None:
    ((names, steps),) = run_ranks(save_under_each_name, 1, settings, str(tmp_path))
    assert names["own"] == names["engine"]
    assert {MOE_LAYER + "pre_mlp_layernorm.weight", DENSE_LAYER + "input_layernorm.weight"} <= names["own"]
    assert not any("layer_norm_weight" in name for name in names["own"])
    assert {MOE_LAYER + name for name in own} <= names["own, unchanged"]
    assert {MOE_LAYER + name for name in engine} <= names["engine, unchanged"]
    assert DENSE_LAYER + "mlp.linear_fc1.layer_norm_weight" in names["engine, unchanged"]
    moments = {f"optimizer.state.exp_avg.{MOE_LAYER}{name}" for name in engine}
    assert moments <= names["engine, unchanged"]
    assert all(step == steps[""] for step in steps.values()), steps


SHARED_EXPERTS: dict[str, Any] = {"moe_shared_expert_intermediate_size": 64}
EXPERT_BIAS: dict[str, Any] = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}


def saved(policy_changes: dict[str, Any], folder: Path) -> str:
    folder.mkdir()
    policy = tiny_policy(2, **policy_changes)
    assert run_ranks(save_once, 2, RunSettings(policy), str(folder), False) == [None, None]
    return str(folder)


@pytest.mark.full
def test_tensors_that_are_missing_or_have_no_place_are_named_on_all_ranks(tmp_path: Path) -> None:
    plain, shared = saved({}, tmp_path / "plain"), saved(SHARED_EXPERTS, tmp_path / "shared")
    stages = layout(pp=2)
    for policy_changes, folders in (({}, [shared, plain]), (SHARED_EXPERTS, [plain, shared])):
        policy = tiny_policy(2, **stages, **policy_changes)
        first, second = run_ranks(load_weights_alone, 2, RunSettings(policy), folders)
        assert first == second
        problem, last = first
        assert last == "loaded"
        wording = "lacks tensors of the model" if policy_changes else "holds tensors that the model has no place for"
        names = [f"decoder.layers.{n}.mlp.shared_experts.linear_fc{m}.weight" for n in range(4) for m in (1, 2)]
        assert problem.startswith(f"{folders[0]}: {wording} (8): {', '.join(names)}; config.json and ")


def test_resuming_refuses_tensors_without_a_place(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    assert run_ranks(save_once, 1, RunSettings(tiny_policy(**SHARED_EXPERTS)), str(folder)) == [None]
    ((problem,),) = run_ranks(problems_of_loading, 1, RunSettings(tiny_policy()), [str(folder)])
    assert "holds tensors that the model has no place for (8): decoder.layers.0.mlp.shared_experts" in problem


def test_expert_bias_begins_with_zeros_and_is_never_lost(tmp_path: Path) -> None:
    plain, biased = saved({}, tmp_path / "plain"), saved(EXPERT_BIAS, tmp_path / "biased")
    ((kept,),) = run_ranks(load_weights_alone, 1, RunSettings(tiny_policy(**EXPERT_BIAS)), [plain])
    assert kept == "loaded"
    ((problem,),) = run_ranks(load_weights_alone, 1, RunSettings(tiny_policy()), [biased])
    assert "no place for (4): decoder.layers.0.mlp.router.expert_bias" in problem
