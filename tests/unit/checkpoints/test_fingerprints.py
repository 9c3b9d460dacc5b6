# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Fingerprints change when an input does, and not otherwise."""

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_rl_moe.checkpoints.changes import changed_keys, wrong_changes
from nemo_rl_moe.checkpoints.fingerprints import (
    changed_inputs,
    model_fingerprint,
    model_fingerprints,
    other_base,
    samples_fingerprint,
)
from nemo_rl_moe.config.algorithm import ALGORITHMS
from nemo_rl_moe.config.loading import load_any_config
from nemo_rl_moe.config.schema import MasterConfig
from nemo_rl_moe.errors import CheckpointError
from nemo_rl_moe.launch.saved_training import SavedTraining
from nemo_rl_moe.launch.start import RunLaunch
from nemo_rl_moe.runs.loggers.console import ConsoleLogger
from tests.support.saving_runs import Place


@pytest.mark.parametrize(
    "others",
    [
        [[1, 2], [4]],
        [[1, 2, 3], [4]],
        [[1], [2, 4]],
        [[4], [1, 2]],
        [[1, 2], [4], []],
        [],
    ],
)
def test_samples(others: list[list[int]]) -> None:
    samples = [np.array([1, 2], dtype=np.int32), np.array([4], dtype=np.int32)]
    fingerprint = samples_fingerprint("data.jsonl", samples)
    assert fingerprint.startswith("data.jsonl: 2 samples, ")
    assert (samples_fingerprint("data.jsonl", others) == fingerprint) == (others == [[1, 2], [4]])


def test_a_model_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"12")
    checkpoint = tmp_path / "policy"
    checkpoint.mkdir()
    first = model_fingerprint(str(tmp_path))
    (tmp_path / "README.md").write_text("")
    os.utime(weights, ns=(10, 10))
    assert model_fingerprint(str(tmp_path)) == first, "a copy is the same"
    seen = {first}
    for change in (
        lambda: weights.write_bytes(b"13"),
        lambda: weights.write_bytes(b"1" * 3_000_000),
        lambda: weights.write_bytes(b"1" * 2_999_999 + b"2"),
        lambda: weights.write_bytes(b"3" + b"1" * 2_999_998 + b"2"),
        lambda: (tmp_path / "config.json").write_text("{ }"),
        lambda: (tmp_path / "model-2.safetensors").write_bytes(b""),
        lambda: (checkpoint / "__0_0.distcp").write_bytes(b"1"),
        lambda: (checkpoint / "__0_0.distcp").write_bytes(b"2"),
    ):
        change()
        seen.add(model_fingerprint(str(tmp_path)))
    assert len(seen) == 9
    assert model_fingerprint("Qwen/Qwen3-1.7B") == "Qwen/Qwen3-1.7B"


def test_a_change_is_reported_with_what_it_means() -> None:
    before = {"training data": "a.jsonl: 3 samples, 00", "model": "m", "gone": "x"}
    assert changed_inputs(before, before) == []
    (line,) = changed_inputs(before, {"training data": "a.jsonl: 4 samples, 11", "model": "m", "new": "y"})
    assert line.startswith("the training data has changed since the checkpoint (a.jsonl: 3 samples, 00 -> a.jsonl: 4")
    assert "twice or never" in line


def base_folder(folder: Path, content: bytes) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(content)
    return str(folder)


@pytest.mark.parametrize("name", ["sft_tiny_moe_lora.yaml", "grpo_tiny_moe_lora.yaml"])
def test_adapters_stand_beside_one_base_whatever_its_place(name: str, tmp_path: Path) -> None:
    def config_at(folder: str, *more: str) -> MasterConfig:
        return load_any_config(
            name, [f"policy.model_name={folder}", "policy.init=pretrained", *more], check_paths=False
        )

    first = config_at(base_folder(tmp_path / "a", b"weights"))
    before = model_fingerprints(first)
    moved = config_at(base_folder(tmp_path / "b", b"weights"))
    assert other_base(moved, before, model_fingerprints(moved)) is None
    assert changed_inputs(before, model_fingerprints(moved)) == [], "a copy is the same"
    base_folder(tmp_path / "a", b"others.")
    now = model_fingerprints(first)
    assert other_base(first, before, now) == ("policy.model_name", before["model"], now["model"])
    whole = config_at(str(tmp_path / "a"), "policy.lora=null")
    assert other_base(whole, before, now) is None, "weights of its own are in the checkpoint"


def test_adapters_of_a_critic_stand_beside_their_base(tmp_path: Path) -> None:
    lora = "{rank: 4, alpha: 8, use_rslora: false, targets: [all-linear], dropout: 0, experts: none, init: kaiming}"
    adapters = [f"value.lora={lora}", "+value.lora.path=null", f"value.model_name={base_folder(tmp_path / 'a', b'1')}"]
    config = load_any_config("ppo_tiny_moe.yaml", adapters, check_paths=False)
    before, name = model_fingerprints(config), "model of the role critic"
    assert other_base(config, before, before) is None
    base_folder(tmp_path / "a", b"2")
    now = model_fingerprints(config)
    assert other_base(config, before, now) == ("value.model_name", before[name], now[name])


def test_an_older_checkpoint_without_the_fingerprint_goes_by_the_name() -> None:
    changes = {"policy.model_name": ("a", "b")}
    sft = ALGORITHMS["sft"]
    assert wrong_changes(sft, changes, with_optimizer=True, with_adapters=True) == {
        "policy.model_name": ("a", "b", "the checkpoint's adapters belong to another base")
    }
    assert wrong_changes(sft, changes, with_optimizer=True, with_adapters=True, base_is_known=True) == {}
    assert wrong_changes(sft, changes, with_optimizer=True) == {}


def test_a_critic_s_adapters_cannot_change_and_an_older_checkpoint_has_none() -> None:
    without: dict[str, Any] = {"value": {"lr": 1.0}}
    null: dict[str, Any] = {"value": {"lr": 1.0, "lora": None}}
    four, eight = ({"value": {"lr": 1.0, "lora": {"rank": rank, "path": None}}} for rank in (4, 8))
    ppo = ALGORITHMS["ppo"]
    assert changed_keys(without, null) == {}
    assert wrong_changes(ppo, changed_keys(four, four), with_optimizer=False) == {}
    for before, now in ((four, eight), (null, four), (four, null), (without, four)):
        (why,) = {
            reason for _, _, reason in wrong_changes(ppo, changed_keys(before, now), with_optimizer=False).values()
        }
        assert why == "the checkpoint's adapters have other settings"


def test_teachers_and_reward_models_have_fingerprints_and_a_critic_has_not(tmp_path: Path) -> None:
    teacher = base_folder(tmp_path / "teacher", b"weights")
    config = load_any_config(
        "distillation_tiny_moe.yaml", [f"distillation.teachers.teacher.model_name={teacher}"], check_paths=False
    )
    before = model_fingerprints(config)
    assert before["model of the role teacher"] == model_fingerprint(teacher)
    base_folder(tmp_path / "teacher", b"others.")
    (line,) = changed_inputs(before, model_fingerprints(config))
    assert line.startswith("the model of the role teacher has changed since the checkpoint (")
    assert "log-probabilities or scores differ" in line
    adapter = base_folder(tmp_path / "adapter", b"factors")
    adapted = load_any_config(
        "distillation_tiny_moe.yaml", [f"distillation.teachers.teacher.adapter={adapter}"], check_paths=False
    )
    with_adapter = model_fingerprints(adapted)
    assert with_adapter["model's adapter of the role teacher"] == model_fingerprint(adapter)
    changes = {"distillation.teachers.teacher.adapter": ("null", adapter)}
    assert wrong_changes(ALGORITHMS["distillation"], changes, with_optimizer=False).keys() == changes.keys()
    scored = load_any_config("grpo_tiny_moe_reward_model.yaml", [], check_paths=False)
    assert "model of the role reward_model" in model_fingerprints(scored)
    trained = load_any_config("ppo_tiny_moe.yaml", [], check_paths=False)
    assert not any("critic" in name for name in model_fingerprints(trained))


def test_a_run_with_adapters_does_not_begin_beside_another_base(place: Place, tmp_path: Path) -> None:
    place.run(0, shared=True, fingerprints={"model": "base: 1 weight files, 00"}).save(1)
    folder = base_folder(tmp_path / "a", b"weights")
    config = load_any_config("sft_tiny_moe_lora.yaml", [f"policy.model_name={folder}"], check_paths=False)
    with ExitStack() as opened:
        saved = SavedTraining(config, RunLaunch("run-b"), ConsoleLogger(10), opened)
        saved.resume = place.found(shared=True)
        with pytest.raises(CheckpointError) as caught:
            saved.begin(10, {})
    assert str(caught.value).startswith(f"policy.model_name: got {folder}: 1 weight files, ")
    assert "was saved with base: 1 weight files, 00: the checkpoint's adapters belong to another base" in str(
        caught.value
    )
