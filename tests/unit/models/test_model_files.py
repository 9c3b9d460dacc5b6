# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The small files beside exported weights: from which folder each of them comes, and that they can be loaded."""

import json
from pathlib import Path

import pytest

from nemo_rl_moe.data.tokenizer import load_tokenizer
from nemo_rl_moe.models.hf_files import load_config_json, load_hf_config
from nemo_rl_moe.models.model_files import collect_model_files, copied_model_files, write_model_files


@pytest.fixture
def model(repository_root: Path) -> str:
    return str(repository_root / "examples" / "assets" / "tiny_qwen3_moe")


def test_collected_files_can_be_loaded(model: str, tmp_path: Path) -> None:
    hf_config, tokenizer = load_hf_config(model), load_tokenizer(model)
    content = load_config_json(model) | {"dtype": "bfloat16"}
    files = collect_model_files(content, hf_config, model, tokenizer)
    write_model_files(files, tmp_path)
    assert load_config_json(str(tmp_path)) == content
    text = "12+34=46"
    assert load_tokenizer(str(tmp_path))(text).input_ids == tokenizer(text).input_ids
    # The model has no generation configuration of its own: what its config.json says of it is taken.
    assert json.loads(files["generation_config.json"])["eos_token_id"] == hf_config.eos_token_id


def test_the_models_own_generation_configuration_is_kept(model: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.25, "do_sample": true}')
    hf_config, tokenizer = load_hf_config(model), load_tokenizer(model)
    files = collect_model_files(load_config_json(model), hf_config, str(tmp_path), tokenizer)
    assert json.loads(files["generation_config.json"])["temperature"] == 0.25


def test_copied_files_are_those_of_the_tokenizer_and_no_weights(tmp_path: Path) -> None:
    hf_config = None
    for name in ("tokenizer.json", "tokenizer.model", "merges.txt", "chat_template.jinja", "generation_config.json"):
        (tmp_path / name).write_text(name)
    for name in ("model.safetensors", "pytorch_model.bin", "state.json", "README.md", "modeling_own.py", "config.json"):
        (tmp_path / name).write_text("not copied")
    (tmp_path / "tokenizer_folder").mkdir()
    files = copied_model_files(tmp_path, {"model_type": "qwen3"}, hf_config)
    assert json.loads(files.pop("config.json")) == {"model_type": "qwen3"}
    assert files.keys() == {
        "tokenizer.json",
        "tokenizer.model",
        "merges.txt",
        "chat_template.jinja",
        "generation_config.json",
    }
    assert all(content == name.encode() for name, content in files.items())
