# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs from a folder with MTP layers: what all that they write contains of these layers."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_rl_moe.config.schema_run import GENERATION_ROLE
from nemo_rl_moe.models.kept_tensors import KEPT_FOLDER
from tests.functional import grpo_runs, sft_runs, shared_ray
from tests.functional.test_lora_run import LORA
from tests.support.mtp_layers import assert_bits_are_kept, count_in, mtp_layers_in, write_with_mtp_layers
from tests.support.quick_list import full

pytestmark = pytest.mark.shared_ray


def make_model(folder: Path, name: str) -> dict[str, Tensor]:
    """A family's model with a MTP layer and the shipped tiny tokenizer; returns the layer's tensors."""
    shutil.copytree(sft_runs.MODEL, folder)
    tensors = write_with_mtp_layers(name, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": 1, "pad_token_id": 0}))
    return tensors


def settings(folder: Path, data: Path, **changes: Any) -> list[str]:
    common: dict[str, Any] = {
        "sft__max_num_steps": 2,
        "sft__val_period": 0,
        "policy__init": "pretrained",
        "policy__train_global_batch_size": 16,
        "policy__train_micro_batch_size": 8,
        "policy__megatron_cfg__expert_model_parallel_size": 2,
        "policy__megatron_cfg__optimizer__lr": 0.01,
        "policy__megatron_cfg__scheduler__lr_warmup_iters": 0,
        "checkpointing__save_period": 1,
        "checkpointing__keep_top_k": 5,
        **sft_runs.only_jsonl(),
    }
    return sft_runs.settings(folder, data, folder / "model", **common | changes)


def converted(source: Path, target: Path, source_format: str, *more: str, to: str = "hf", exit_code: int = 0) -> str:
    """Convert, and return what was printed on standard error."""
    words = ["convert", "--from", source_format, "--to", to, "--input", str(source), "--output", str(target)]
    return shared_ray.called_here([*words, *more], exit_code=exit_code).stderr


@pytest.mark.parametrize("name", [full("deepseek_v3"), "qwen3_5_moe"])
def test_conversions_keep_them(name: str, tmp_path: Path) -> None:
    expected = make_model(tmp_path / "model", name)
    converted(tmp_path / "model", tmp_path / "first", "hf", to="megatron")
    converted(tmp_path / "first", tmp_path / "second", "megatron", to="megatron")
    converted(tmp_path / "second", tmp_path / "back", "megatron")
    for folder in ("first", "second"):
        assert_bits_are_kept(tmp_path / folder / KEPT_FOLDER, expected)
    assert_bits_are_kept(tmp_path / "back", expected)
    assert [count_in(tmp_path / folder) for folder in ("first", "second", "back")] == [1, 1, 1]
    with (tmp_path / "second" / KEPT_FOLDER / "model.safetensors").open("r+b") as file:
        file.seek(-3, 2)
        file.write(b"\x55")
    printed = converted(tmp_path / "second", tmp_path / "again", "megatron", exit_code=2)
    assert f"second/{KEPT_FOLDER}/model.safetensors: damaged in " in printed


def test_checkpoints_resumed_runs_and_conversions_keep_them(tmp_path: Path) -> None:
    expected = make_model(tmp_path / "model", "deepseek_v3")
    data = sft_runs.make_additions(tmp_path / "data", 100, 20)
    checkpoints = tmp_path / "checkpoints"
    for num_steps in (2, 3):
        overrides = settings(tmp_path, data, sft__max_num_steps=num_steps, checkpointing__checkpoint_dir=checkpoints)
        sft_runs.run_here(overrides, tmp_path)
        assert_bits_are_kept(checkpoints / "final", expected)
        assert count_in(checkpoints / "final") == 1
        assert_bits_are_kept(checkpoints / f"step_{num_steps}" / KEPT_FOLDER, expected)
    assert sorted(path.name for path in checkpoints.glob("step_*")) == ["step_1", "step_2", "step_3"]
    shutil.rmtree(tmp_path / "model")  # a checkpoint needs no other folder
    converted(checkpoints / "step_3", tmp_path / "exported", "megatron")
    assert_bits_are_kept(tmp_path / "exported", expected)
    assert count_in(tmp_path / "exported") == 1
    shared_ray.called_here(["verify", str(checkpoints / "step_3")])
    (checkpoints / "step_3" / KEPT_FOLDER / "model.safetensors").write_bytes(b"changed")
    done = shared_ray.called_here(["verify", str(checkpoints / "step_3")], exit_code=None)
    assert done.returncode != 0
    assert f"step_3/{KEPT_FOLDER}/model.safetensors: damaged" in done.stdout + done.stderr


@pytest.mark.full
def test_merged_adapters_keep_them(tmp_path: Path) -> None:
    expected = make_model(tmp_path / "model", "deepseek_v3")
    data = sft_runs.make_additions(tmp_path / "data", 100, 20)
    sft_runs.run_here(settings(tmp_path, data, policy__lora=LORA), tmp_path)
    checkpoints = sft_runs.only_run_folder(tmp_path) / "checkpoints"
    assert not (checkpoints / "step_2" / KEPT_FOLDER).exists(), "a checkpoint of adapters lacks their base"
    assert_bits_are_kept(checkpoints / "final", expected)
    converted(tmp_path / "model", tmp_path / "merged", "hf", "--adapter", str(checkpoints / "step_2"))
    assert_bits_are_kept(tmp_path / "merged", expected)
    assert count_in(tmp_path / "merged") == 1


def test_source_without_its_files_is_an_error_at_the_start(tmp_path: Path) -> None:
    make_model(tmp_path / "model", "deepseek_v3")
    (tmp_path / "model" / "mtp_layers.safetensors").unlink()
    data = sft_runs.make_additions(tmp_path / "data", 100, 20)
    done = sft_runs.run_here(settings(tmp_path, data), tmp_path, exit_code=2)
    assert "mtp_layers.safetensors: cannot be read: No such file or directory" in done.stderr


def changed_share(folder: Path, expected: dict[str, Tensor]) -> float:
    found = mtp_layers_in(folder, expected)
    assert found.keys() == expected.keys()
    return sum(not torch.equal(found[name].float(), expected[name].float()) for name in expected) / len(expected)


def test_trained_layers_are_exported_converted_and_refused_without_the_setting(tmp_path: Path) -> None:
    expected = make_model(tmp_path / "published", "glm4_moe")
    converted(tmp_path / "published", tmp_path / "model", "hf", to="megatron")
    data = sft_runs.make_additions(tmp_path / "data", 100, 20)
    checkpoints = tmp_path / "checkpoints"
    mtp = {"policy__megatron_cfg__mtp_num_layers": 1, "checkpointing__checkpoint_dir": checkpoints}
    for num_steps in (2, 3):
        sft_runs.run_here(settings(tmp_path, data, sft__max_num_steps=num_steps, **mtp), tmp_path)
    assert count_in(checkpoints / "final") == 1
    assert changed_share(checkpoints / "final", expected) > 0.5
    final = mtp_layers_in(checkpoints / "final", {"model.embed_tokens.weight": Tensor(), "lm_head.weight": Tensor()})
    copies = mtp_layers_in(checkpoints / "final", expected)
    assert torch.equal(copies["model.layers.4.embed_tokens.weight"], final["model.embed_tokens.weight"])
    assert torch.equal(copies["model.layers.4.shared_head.head.weight"], final["lm_head.weight"])
    assert not (checkpoints / "step_3" / KEPT_FOLDER).exists()
    converted(checkpoints / "step_3", tmp_path / "exported", "megatron")
    for name in ("exported", "checkpoints/final"):
        assert count_in(tmp_path / name) == 1
    assert_bits_are_kept(tmp_path / "exported", copies)
    losses = [
        step["train/mtp_1_loss"] for folder in (tmp_path / "logs").iterdir() for step in sft_runs.steps_of(folder)
    ]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    without = settings(tmp_path, data, policy__model_name=checkpoints / "step_3", checkpointing__enabled=False)
    done = sft_runs.run_here(without, tmp_path, exit_code=2)
    (line,) = done.stderr.splitlines()
    assert "policy.megatron_cfg.mtp_num_layers: got null, but " in line
    assert f"convert --from megatron --to hf --input {checkpoints / 'step_3'} writes" in line


@pytest.mark.full
def test_rollouts_by_an_engine_and_their_routes(tmp_path: Path) -> None:
    """An engine gets the model's tensors only, and its routes are those of the model's layers."""
    expected = make_model(tmp_path / "model", "deepseek_v3")
    path = tmp_path / "model" / "config.json"
    overrides = grpo_runs.settings(
        tmp_path,
        grpo_runs.make_prompts(tmp_path / "data", 40),
        policy__model_name=tmp_path / "model",
        policy__init="pretrained",
        policy__generation__backend="megatron_separate",
        policy__train_global_batch_size=8,
        policy__megatron_cfg__pipeline_model_parallel_size=2,
        policy__megatron_cfg__routing_replay="rollout",
        policy__megatron_cfg__mtp_num_layers=1,
        grpo__max_num_steps=10,
        cluster__cpu_workers_per_node=2,
        **sft_runs.only_jsonl(),
    )
    role = f"+cluster.roles.{GENERATION_ROLE}={{cpu_workers_per_node: 1}}"
    (tmp_path / "work").mkdir()
    grpo_runs.run_here([*overrides, role], tmp_path / "work")
    assert json.loads(path.read_text())["num_nextn_predict_layers"] == 1
    run_folder = sft_runs.only_run_folder(tmp_path)
    for step in sft_runs.steps_of(run_folder):
        assert step["train/mtp_1_loss"] > 0
        assert step["train/token_mult_prob_error"] < 1 + 1e-4
        assert step["train/moe/routing/rows_usable_share"] == 1
    assert changed_share(run_folder / "checkpoints" / "final", expected) > 0.5
