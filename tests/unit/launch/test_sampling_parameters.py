# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_moe.config.loading import load_grpo_config
from nemo_rl_moe.config.schema_grpo import GenerationConfig
from nemo_rl_moe.data.tokenizer import load_tokenizer
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.generation.interface import SamplingParameters
from nemo_rl_moe.launch.grpo import sampling_parameters

pytestmark = pytest.mark.megatron

VOCABULARY_SIZE = 5

# None of them what the exemplar or `SamplingParameters` has.
CHOSEN: dict[str, Any] = {
    "max_new_tokens": 7,
    "temperature": 0.75,
    "top_k": 5,
    "top_p": 0.5,
    "stop_token_ids": [4, 3],
    "stop_strings": ["</think>", "="],
}


@pytest.fixture(scope="module")
def tokenizer(repository_root: Path) -> Any:
    return load_tokenizer(str(repository_root / "examples" / "assets" / "tiny_qwen3_moe"))


def generation_config(**changes: Any) -> GenerationConfig:
    shipped = load_grpo_config("grpo_tiny_moe.yaml", check_paths=False).policy.generation
    return GenerationConfig.model_validate(shipped.model_dump() | changes)


def test_every_field_reaches_the_engine(tokenizer: Any) -> None:
    shipped = generation_config().model_dump()
    assert not [name for name, value in CHOSEN.items() if shipped[name] == value]
    of_the_loss = {"returns_kept_tokens"}
    assert CHOSEN.keys() == {field.name for field in fields(SamplingParameters)} - of_the_loss
    # Which engine, and how many sequences at a time, is not a matter of sampling.
    engine = {"backend", "vllm", "megatron_separate", "weight_transport", "lora_refit", "refit_check", "max_batch_size"}
    assert CHOSEN.keys() == GenerationConfig.model_fields.keys() - engine
    assert sampling_parameters(generation_config(**CHOSEN), tokenizer, VOCABULARY_SIZE) == SamplingParameters(
        max_new_tokens=7,
        temperature=0.75,
        top_k=5,
        top_p=0.5,
        stop_token_ids=(4, 3),
        stop_strings=("</think>", "="),
    )


def test_null_means_the_end_token_no_string_and_all_tokens(tokenizer: Any) -> None:
    config = generation_config(stop_token_ids=None, stop_strings=None, top_k=None)
    found = sampling_parameters(config, tokenizer, VOCABULARY_SIZE)
    assert found.stop_token_ids == (tokenizer.eos_token_id,)
    assert found.stop_strings == ()
    assert found.top_k is None


def test_nothing_would_end_a_response(repository_root: Path) -> None:
    endless = load_tokenizer(str(repository_root / "examples" / "assets" / "tiny_qwen3_moe"))
    endless.eos_token = None
    with pytest.raises(ConfigurationError, match=r"policy\.generation\.stop_token_ids: null .* it has none"):
        sampling_parameters(generation_config(stop_token_ids=None), endless, VOCABULARY_SIZE)
    # Named ids need no end token.
    assert sampling_parameters(generation_config(stop_token_ids=[4]), endless, VOCABULARY_SIZE).stop_token_ids == (4,)


@pytest.mark.parametrize("strings", [None, []])
def test_an_empty_list_needs_stop_strings(tokenizer: Any, strings: list[str] | None) -> None:
    with pytest.raises(ConfigurationError) as caught:
        sampling_parameters(generation_config(stop_token_ids=[], stop_strings=strings), tokenizer, VOCABULARY_SIZE)
    assert caught.value.problems == [
        "policy.generation.stop_token_ids: got [], and policy.generation.stop_strings has none either, so that nothing"
        " would end a response; expected token ids, or null for the tokenizer's end token"
    ]
    config = generation_config(stop_token_ids=[], stop_strings=["="])
    assert sampling_parameters(config, tokenizer, VOCABULARY_SIZE).stop_strings == ("=",)


def test_stop_tokens_are_in_the_vocabulary(tokenizer: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        sampling_parameters(generation_config(stop_token_ids=[4, 5, 99]), tokenizer, VOCABULARY_SIZE)
    assert caught.value.problems == [
        "policy.generation.stop_token_ids: got 5, 99, expected ids from 0 to 4: the model has 5 tokens"
    ]
    with pytest.raises(ConfigurationError, match=r"got null, the tokenizer's end token 1, expected ids from 0 to 0"):
        sampling_parameters(generation_config(stop_token_ids=None), tokenizer, 1)
