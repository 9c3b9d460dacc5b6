# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The small files beside exported weights: from which folder each of them comes, and that they can be loaded."""

import json
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_moe.data.tokenizer import load_tokenizer
from nemo_rl_moe.models.hf_files import load_config_json, load_hf_config
from nemo_rl_moe.models.model_files import collect_model_files, copied_model_files, tokenizer_code, write_model_files


@pytest.fixture
def model(repository_root: Path) -> str:
    return str(repository_root / "examples" / "assets" / "tiny_qwen3_moe")


def test_collected_files_can_be_loaded(model: str, tmp_path: Path) -> None:
    hf_config, tokenizer = load_hf_config(model), load_tokenizer(model)
    content = load_config_json(model) | {"dtype": "bfloat16"}
    files = collect_model_files(content, hf_config, Path(model), tokenizer)
    write_model_files(files, tmp_path)
    assert load_config_json(str(tmp_path)) == content
    text = "12+34=46"
    assert load_tokenizer(str(tmp_path))(text).input_ids == tokenizer(text).input_ids
    # The model has no generation configuration of its own: what its config.json says of it is taken.
    assert json.loads(files["generation_config.json"])["eos_token_id"] == hf_config.eos_token_id


@pytest.mark.parametrize(
    "content", [{"temperature": 0.6, "top_p": 0.9}, {"top_k": 20}, {"pad_token_id": -1}, {"do_sample": True}]
)
def test_the_models_own_generation_configuration_is_copied_as_it_is(
    content: dict[str, Any], model: str, tmp_path: Path
) -> None:
    """Models ship what transformers refuses to write itself."""
    (tmp_path / "generation_config.json").write_text(json.dumps(content, indent=3))
    hf_config, tokenizer = load_hf_config(model), load_tokenizer(model)
    for files in (
        collect_model_files(load_config_json(model), hf_config, tmp_path, tokenizer),
        copied_model_files(tmp_path, load_config_json(model), hf_config),
    ):
        assert files["generation_config.json"] == json.dumps(content, indent=3).encode()


def test_copied_files_are_those_of_the_tokenizer_and_no_weights(tmp_path: Path) -> None:
    hf_config = None
    copied = {
        "tokenizer.json",
        "tokenizer.model",
        "spiece.model",
        "tiktoken.model",
        "tekken.json",
        "merges.txt",
        "chat_template.jinja",
        "generation_config.json",
    }
    left = ("model.safetensors", "pytorch_model.bin", "state.json", "README.md", "modeling_own.py", "config.json")
    for name in copied:
        (tmp_path / name).write_text(name)
    for name in (*left, "tokenization_own.py", "tokenizer_own.py"):
        (tmp_path / name).write_text("not copied")
    (tmp_path / "tokenizer_folder").mkdir()
    files = copied_model_files(tmp_path, {"model_type": "qwen3"}, hf_config)
    assert json.loads(files.pop("config.json")) == {"model_type": "qwen3"}
    assert files.keys() == copied
    assert all(content == name.encode() for name, content in files.items())


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (
            '{"auto_map": {"AutoTokenizer": ["tokenization_moonshot.TikTokenTokenizer", null]}}',
            ["tokenization_moonshot.py"],
        ),
        ('{"auto_map": ["own.Slow", "fast.Fast"]}', ["fast.py", "own.py"]),
        ('{"auto_map": {"AutoTokenizer": "own.Slow"}}', ["own.py"]),
        ('{"auto_map": {"AutoProcessor": "own.Processor"}}', []),
        ('{"auto_map": 3}', []),
        ("{}", []),
        ("[]", []),
        ("no JSON", []),
    ],
)
def test_code_that_a_tokenizer_needs_is_named(content: str, expected: list[str]) -> None:
    assert tokenizer_code({"tokenizer_config.json": content.encode()}) == expected
    assert tokenizer_code({}) == []
