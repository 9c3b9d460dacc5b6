# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The tiny models that ship with the package: found from any folder, in a checkout and in a wheel."""

import tomllib
from pathlib import Path

import pytest

from nemo_rl_moe.config.files import exemplar_names, find_config, read_with_defaults
from nemo_rl_moe.config.loading import load_any_config
from nemo_rl_moe.config.shipped_models import SHIPPED_MODELS, with_shipped_models
from tests.conftest import REPOSITORY_ROOT

ASSETS = REPOSITORY_ROOT / "examples" / "assets"


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def overrides(folder: Path) -> list[str]:
    (folder / "train.jsonl").write_text("")
    return [f"data.{name}.path=train.jsonl" for name in ("train", "validation")]


@pytest.mark.parametrize("model", [*SHIPPED_MODELS, "model_configs/Qwen3-30B-A3B"])
@pytest.mark.parametrize("prefix", ["", "examples/assets/"])
def test_a_shipped_model_is_found_from_any_folder(elsewhere: Path, model: str, prefix: str) -> None:
    config = load_any_config("sft_tiny_moe.yaml", [f"policy.model_name={prefix}{model}", *overrides(elsewhere)])
    assert config.policy.model_name == str(ASSETS / model)
    assert config.policy.tokenizer.name == config.policy.model_name


def test_a_folder_of_the_users_own_wins(elsewhere: Path) -> None:
    (elsewhere / "examples/assets/tiny_qwen3_moe").mkdir(parents=True)
    (elsewhere / "examples/assets/tiny_qwen3_moe/config.json").write_text("{}")
    config = load_any_config("sft_tiny_moe.yaml", overrides(elsewhere))
    assert config.policy.model_name == "examples/assets/tiny_qwen3_moe"


def test_other_names_and_other_keys_stay(elsewhere: Path) -> None:
    values = {"name": "tiny_qwen3_moe", "policy": {"model_name": "Qwen/Qwen3-1.7B", "tokenizer": {"name": None}}}
    assert with_shipped_models(values) == values


@pytest.mark.parametrize("name", ["model_configs/Qwen3", "model_configs/README.md", "model_configs/"])
def test_only_shipped_model_configs_are_found(elsewhere: Path, name: str) -> None:
    values = {"policy": {"model_name": name}}
    assert with_shipped_models(values) == values


def test_the_wheel_holds_what_the_shipped_configurations_of_text_name() -> None:
    project = tomllib.loads((REPOSITORY_ROOT / "pyproject.toml").read_text())
    included = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    for model in SHIPPED_MODELS:
        assert included[f"examples/assets/{model}"] == f"nemo_rl_moe/exemplar_models/{model}"
        assert sum(path.stat().st_size for path in (ASSETS / model).iterdir()) < 20_000
    assert included["examples/assets/model_configs"] == "nemo_rl_moe/exemplar_models/model_configs"
    named = {read_with_defaults(find_config(name)).get("policy", {}).get("model_name") for name in exemplar_names()}
    assets = {Path(name).name for name in named if isinstance(name, str) and name.startswith("examples/assets/")}
    assert assets - set(SHIPPED_MODELS) == {"tiny_internvl_moe"}  # images: their data are made in a checkout
