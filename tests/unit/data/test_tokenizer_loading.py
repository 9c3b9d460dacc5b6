# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Tokenizers from folders."""

import json

import pytest

from nemo_rl_moe.checksums import write_inventory
from nemo_rl_moe.data.tokenizer import load_tokenizer, pad_token_id
from nemo_rl_moe.errors import ConfigurationError, DataError


def test_template_of_the_user_s_own(repository, tmp_path):
    (tmp_path / "t.jinja").write_text("{{ messages[0].content }}")
    folder = str(repository / "examples/assets/tiny_qwen3_moe")
    assert load_tokenizer(folder, str(tmp_path / "t.jinja")).chat_template == "{{ messages[0].content }}"
    with pytest.raises(ConfigurationError, match=r"^policy.tokenizer.chat_template: .*no.jinja: "):
        load_tokenizer(folder, str(tmp_path / "no.jinja"))


def test_folder_without_a_tokenizer_is_one_line(tmp_path):
    with pytest.raises(ConfigurationError) as error:
        load_tokenizer(str(tmp_path))
    (problem,) = error.value.problems
    assert problem == f"policy.tokenizer.name: {tmp_path}: holds no tokenizer; expected a file such as tokenizer.json"
    (tmp_path / "tokenizer.json").write_text("no JSON")
    with pytest.raises(ConfigurationError) as error:
        load_tokenizer(str(tmp_path))
    (problem,) = error.value.problems
    assert problem.startswith(f"policy.tokenizer.name: {tmp_path}: cannot be loaded: ")
    assert "\n" not in problem


def test_a_damaged_tokenizer_is_reported(repository, tmp_path):
    """A vocabulary with two tokens exchanged loads, and trains on other texts."""
    whole = (repository / "examples/assets/tiny_qwen3_moe/tokenizer.json").read_text()
    path = tmp_path / "tokenizer.json"
    path.write_text(whole)
    write_inventory(tmp_path)
    load_tokenizer(str(tmp_path))
    vocabulary = json.loads(whole)["model"]["vocab"]
    first, second = (f'"{digit}": {vocabulary[digit]}' for digit in "34")
    assert first in whole
    assert second in whole
    path.write_text(whole.replace(first, f'"3": {vocabulary["4"]}').replace(second, f'"4": {vocabulary["3"]}'))
    with pytest.raises(ConfigurationError) as error:
        load_tokenizer(str(tmp_path))
    assert str(error.value).startswith(f"policy.tokenizer.name: {path}: damaged: not the bytes that were written")


def test_pad_token(demo_tokenizer, byte_tokenizer):
    assert pad_token_id(demo_tokenizer) == 0
    without = byte_tokenizer()
    assert pad_token_id(without) == without.convert_tokens_to_ids("<|end|>")
    with pytest.raises(DataError, match="neither a padding token nor an end token"):
        pad_token_id(byte_tokenizer(eos_token=None))


def test_odd_keys_of_a_tokenizer_are_not_printed(repository, tmp_path, capfd):
    """The library prints them as they are, past Python's standard output."""
    whole = json.loads((repository / "examples/assets/tiny_qwen3_moe/tokenizer.json").read_text())
    whole["added_tokens"][0]["\x1b[31m"] = 1
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    load_tokenizer(str(tmp_path))
    print("still printed")
    assert capfd.readouterr().out == "still printed\n"


def test_a_number_without_an_end_is_not_shown_whole(repository, tmp_path):
    text = (repository / "examples/assets/tiny_qwen3_moe/tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(text.replace("1", "1" * 5000, 1))
    with pytest.raises(ConfigurationError) as error:
        load_tokenizer(str(tmp_path))
    assert len(str(error.value)) < 600


def test_tokens_are_those_of_the_file_whatever_class_is_named(byte_tokenizer, tmp_path):
    """DeepSeek's files name a class that transformers builds anew as a Llama: it drops blanks and line breaks."""
    published = byte_tokenizer()
    published.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "tokenizer_class": "LlamaTokenizerFast"}))
    loaded = load_tokenizer(str(tmp_path))
    text = "a  b\n\nc"
    assert loaded(text, add_special_tokens=False)["input_ids"] == published(text)["input_ids"]
    assert loaded.decode(loaded(text)["input_ids"]) == text
    assert loaded.eos_token == "<|end|>"


def test_a_stored_truncation_is_no_other_tokenizer(byte_tokenizer, tmp_path):
    byte_tokenizer().save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "tokenizer.json").read_text())
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps({**stored, "truncation": truncation}))
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "tokenizer_class": "Qwen2Tokenizer"}))
    assert type(load_tokenizer(str(tmp_path))).__name__ == "Qwen2Tokenizer"
