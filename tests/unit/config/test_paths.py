# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Keys of paths: the home folder, and variables that only a shell fills in."""

from pathlib import Path

import pytest

from nemo_rl_moe.config.loading import load_grpo_config
from nemo_rl_moe.errors import ConfigurationError
from tests.unit.config.conftest import refused

KEYS = (
    "logger.log_dir",
    "checkpointing.checkpoint_dir",
    "policy.model_name",
    "policy.tokenizer.name",
    "policy.tokenizer.chat_template",
    "data.train.path",
    "data.validation.path",
    "data.image_root",
    "grpo.rollouts.replay_schedule",
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("key", [key for key in KEYS if key != "grpo.rollouts.replay_schedule"])
def test_the_home_folder_is_filled_in(key: str, home: Path) -> None:
    config = load_grpo_config("grpo_tiny_moe.yaml", [f"{key}=~/some/place"], check_paths=False)
    value: object = config
    for part in key.split("."):
        value = getattr(value, part)
    assert value == str(home / "some/place")


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("path", ["$HOME/logs", "/scratch/$USER/x", "~nobody-of-this-name/x"])
def test_a_variable_is_refused(key: str, path: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_grpo_config("grpo_tiny_moe.yaml", [f"{key}={path}"], check_paths=False)
    words = "expected a path (~ is the home folder, ${oc.env:NAME} a variable)"
    assert caught.value.problems[0].removesuffix(" or null") == f"{key}: got '{path}' (str), {words}"


def test_a_name_on_the_hub_stays() -> None:
    config = load_grpo_config("grpo_tiny_moe.yaml", ["policy.model_name=Qwen/Qwen3-30B-A3B"], check_paths=False)
    assert config.policy.model_name == "Qwen/Qwen3-30B-A3B"


def test_a_variable_is_filled_in_a_path_by_its_interpolation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRATCH_8143", "/scratch/me")
    own = tmp_path / "own.yaml"
    own.write_text("defaults: grpo_tiny_moe.yaml\nlogger: {log_dir: '${oc.env:SCRATCH_8143}/logs'}\n")
    overrides = ["data.image_root=x/${oc.env:SCRATCH_8143}", "checkpointing.checkpoint_dir=${logger.log_dir}"]
    config = load_grpo_config(own, overrides, check_paths=False)
    assert config.logger.log_dir == "/scratch/me/logs"
    assert config.data.image_root == "x//scratch/me"
    assert config.checkpointing.checkpoint_dir == "/scratch/me/logs"


def test_a_variable_that_is_not_set_or_stands_in_no_path_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN_8143", "hush")
    overrides = ["logger.log_dir=${oc.env:UNSET_8143}", "logger.wandb.project=${oc.env:TOKEN_8143}"]
    assert refused(load_grpo_config, "grpo_tiny_moe.yaml", overrides, check_paths=False) == [
        "logger.log_dir: '${oc.env:UNSET_8143}': the variable UNSET_8143 is not set",
        "logger.wandb.project: '${oc.env:TOKEN_8143}' is not allowed: ${...} takes the name of another key and nothing"
        " else",
    ]
