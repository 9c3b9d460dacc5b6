# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The demo's model folder is what its script makes, and loads."""

import importlib.util

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

FILES = ("chat_template.jinja", "config.json", "tokenizer.json", "tokenizer_config.json")
CHARACTERS = "0123456789+-=;abcdefghijklmnopqrstuvwxyz "


@pytest.fixture(scope="module")
def folder(repository):
    return repository / "examples/assets/tiny_qwen3_moe"


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


def test_folder_is_what_the_script_makes(repository, folder, tmp_path):
    spec = importlib.util.spec_from_file_location("maker", repository / "examples/assets/make_tiny_qwen3_moe.py")
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    maker.write_model_folder(tmp_path / folder.name)
    for name in (folder.name, f"{folder.name}_tools"):
        shipped = folder.with_name(name)
        assert sorted(path.name for path in shipped.iterdir()) == list(FILES)
        for file in FILES:
            assert (tmp_path / name / file).read_bytes() == (shipped / file).read_bytes()


def test_configuration(folder):
    config = AutoConfig.from_pretrained(folder)
    assert (config.model_type, config.architectures) == ("qwen3_moe", ["Qwen3MoeForCausalLM"])
    assert (config.num_hidden_layers, config.hidden_size, config.head_dim) == (4, 128, 32)
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)
    assert (config.num_experts, config.num_experts_per_tok, config.norm_topk_prob) == (8, 2, True)
    assert (config.moe_intermediate_size, config.intermediate_size) == (128, 256)
    assert (config.initializer_range, config.router_aux_loss_coef, config.tie_word_embeddings) == (0.06, 0.01, False)
    assert (config.mlp_only_layers, config.decoder_sparse_step) == ([], 1)
    assert (config.max_position_embeddings, config.rope_parameters["rope_theta"]) == (512, 10000.0)
    assert AutoModelForCausalLM.from_config(config).num_parameters() == 1_786_496


def test_special_tokens_and_configuration_agree(folder, tokenizer):
    config = AutoConfig.from_pretrained(folder)
    assert len(tokenizer) == tokenizer.vocab_size == config.vocab_size == 45
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (config.pad_token_id, config.eos_token_id) == (0, 1)
    assert tokenizer.convert_tokens_to_ids(["<think>", "</think>"]) == [2, 3]


def test_template_joins_without_role_tokens(tokenizer):
    conversation = [{"role": "user", "content": "228+378="}, {"role": "assistant", "content": "<think></think>606"}]
    text = tokenizer.apply_chat_template(conversation, tokenize=False)
    assert text == "228+378=<think></think>606<eos>"
    prompt = tokenizer.apply_chat_template(conversation[:1], tokenize=False, add_generation_prompt=True)
    assert prompt == "228+378="
    encoded = tokenizer.apply_chat_template(conversation, return_assistant_tokens_mask=True, return_dict=True)
    assert encoded["assistant_masks"] == [0] * 8 + [1] * 6


def test_think_tags_survive_decoding_without_special_tokens(tokenizer):
    ids = tokenizer("1+1=<think>1+1=2</think>2<eos><pad>")["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "1+1=<think>1+1=2</think>2"


def test_other_characters_are_an_error(tokenizer):
    for text in ("A", "\u00e9", "\n", "<"):
        with pytest.raises(Exception, match=r"Missing \[UNK\]"):
            tokenizer(text)


@given(text=st.lists(st.sampled_from([*CHARACTERS, "<think>", "</think>", "<eos>"])).map("".join))
def test_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_model_with_tools_shows_them_and_takes_any_text(repository):
    tokenizer = AutoTokenizer.from_pretrained(repository / "examples/assets/tiny_qwen3_moe_tools")
    config = AutoConfig.from_pretrained(repository / "examples/assets/tiny_qwen3_moe_tools")
    assert len(tokenizer) == config.vocab_size == 259
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (config.pad_token_id, config.eos_token_id) == (0, 2)
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    turns = [{"role": "user", "content": "\u00e9?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    text = tokenizer.apply_chat_template(turns, tools=[tool], tokenize=False)
    assert text.endswith('assistant\n<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>\n')
    assert '"name": "add", "parameters"' in text
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
