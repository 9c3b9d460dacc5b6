# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from nemo_rl_moe.config.loading import load_grpo_config
from nemo_rl_moe.config.schema_grpo import GenerationConfig
from nemo_rl_moe.data.speech import Published, Speech, describe_speech, load_published
from nemo_rl_moe.data.tokenizer import load_tokenizer
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.generation.interface import SamplingParameters
from nemo_rl_moe.launch.grpo import sampling_parameters, scored_thinking
from tests.support.chat_templates import make_byte_tokenizer

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
def speech(repository_root: Path) -> Speech:
    return describe_speech(load_tokenizer(str(repository_root / "examples" / "assets" / "tiny_qwen3_moe")))


def generation_config(**changes: Any) -> GenerationConfig:
    shipped = load_grpo_config("grpo_tiny_moe.yaml", check_paths=False).policy.generation
    return GenerationConfig.model_validate(shipped.model_dump() | changes)


def test_every_field_reaches_the_engine(speech: Speech) -> None:
    shipped = generation_config().model_dump()
    assert not [name for name, value in CHOSEN.items() if shipped[name] == value]
    of_others = {"returns_kept_tokens", "scores_prompt"}  # the loss, and requests to a served model
    assert CHOSEN.keys() == {field.name for field in fields(SamplingParameters)} - of_others
    # Which engine, and how many sequences at a time, is not a matter of sampling.
    engine = {"backend", "vllm", "megatron_separate", "weight_transport", "lora_refit", "refit_check", "max_batch_size"}
    assert CHOSEN.keys() == GenerationConfig.model_fields.keys() - engine
    assert sampling_parameters(generation_config(**CHOSEN), speech, VOCABULARY_SIZE) == SamplingParameters(
        max_new_tokens=7, temperature=0.75, top_k=5, top_p=0.5, stop_token_ids=(4, 3), stop_strings=("</think>", "=")
    )


def test_null_means_the_end_token_no_string_and_all_tokens(speech: Speech) -> None:
    config = generation_config(stop_token_ids=None, stop_strings=None, top_k=None)
    found = sampling_parameters(config, speech, VOCABULARY_SIZE)
    assert found.stop_token_ids == (1,)
    assert found.stop_strings == ()
    assert found.top_k is None


def test_null_means_all_that_the_models_files_name() -> None:
    marks = ("<|endoftext|>", "<|user|>", "<|observation|>")
    tokenizer = make_byte_tokenizer(None, more_special=marks, eos_token=marks[0])
    ends = tokenizer.convert_tokens_to_ids(marks)
    speech = describe_speech(tokenizer, Published({"eos_token_id": ends[:2]}, {"eos_token_id": ends[1:]}))
    assert sampling_parameters(generation_config(stop_token_ids=None), speech, 300).stop_token_ids == tuple(ends)
    # Who names some means these alone.
    assert sampling_parameters(generation_config(stop_token_ids=[7]), speech, 300).stop_token_ids == (7,)


def test_the_recipes_of_glm_stop_at_all_three_tokens(repository_root: Path) -> None:
    for recipe, folder, end in (
        ("grpo_glm_4_5_air_lora.yaml", "GLM-4.5-Air", 151329),
        ("grpo_glm_4_7_flash.yaml", "GLM-4.7-Flash", 154820),
    ):
        config = load_grpo_config(recipe, ["data.train.path=x", "data.validation=null"], check_paths=False)
        published = load_published(str(repository_root / "examples" / "assets" / "model_configs" / folder))
        user, observation = (151336, 151338) if end == 151329 else (154827, 154829)
        tokenizer = WithTokens(end, {end: "<|endoftext|>", user: "<|user|>", observation: "<|observation|>"})
        found = sampling_parameters(config.policy.generation, describe_speech(tokenizer, published), 160_000)
        assert found.stop_token_ids == (end, user, observation)


class WithTokens:
    """What is read of a tokenizer without a template, with the ids of a published one."""

    chat_template = None

    def __init__(self, end: int, texts: dict[int, str]):
        self.eos_token_id = end
        self.added_tokens_decoder = {number: AddedToken(text, special=True) for number, text in texts.items()}


def test_nothing_is_named_to_end_a_response(repository_root: Path) -> None:
    endless = load_tokenizer(str(repository_root / "examples" / "assets" / "tiny_qwen3_moe"))
    endless.eos_token = None
    speech = describe_speech(endless)
    with pytest.raises(ConfigurationError, match=r"policy\.generation\.stop_token_ids: null means .* name none"):
        sampling_parameters(generation_config(stop_token_ids=None), speech, VOCABULARY_SIZE)
    # Named ids need no end token.
    assert sampling_parameters(generation_config(stop_token_ids=[4]), speech, VOCABULARY_SIZE).stop_token_ids == (4,)


@pytest.mark.parametrize("strings", [None, ["="]])
def test_an_empty_list_means_that_no_token_ends_a_response(speech: Speech, strings: list[str] | None) -> None:
    config = generation_config(stop_token_ids=[], stop_strings=strings)
    found = sampling_parameters(config, speech, VOCABULARY_SIZE)
    assert (found.stop_token_ids, found.stop_strings) == ((), tuple(strings or ()))


def test_stop_tokens_are_in_the_vocabulary(speech: Speech) -> None:
    with pytest.raises(ConfigurationError) as caught:
        sampling_parameters(generation_config(stop_token_ids=[4, 5, 99]), speech, VOCABULARY_SIZE)
    assert caught.value.problems == [
        "policy.generation.stop_token_ids: got 5, 99, expected ids from 0 to 4: the model has 5 tokens"
    ]
    with pytest.raises(ConfigurationError, match=r"got null, the model's end token 1, expected ids from 0 to 0"):
        sampling_parameters(generation_config(stop_token_ids=None), speech, 1)


@pytest.mark.parametrize(
    ("name", "answer_after", "warns"), [("exact", None, True), ("exact", "A", False), ("math", None, False)]
)
def test_whole_responses_of_a_model_that_thinks_are_named(name: str, answer_after: str | None, warns: bool) -> None:
    after = "null" if answer_after is None else answer_after
    overrides = [f"env.reward.kind={name}", f"env.reward.answer_after={after}"]
    config = load_grpo_config("grpo_tiny_moe.yaml", overrides, check_paths=False)
    thinks = describe_speech(make_byte_tokenizer("{{ messages[-1].content.split('</think>')[-1] }}"))
    plain = describe_speech(make_byte_tokenizer("{{ messages[-1].content }}"))
    lines = list(scored_thinking(config, thinks))
    assert [line.startswith("env.reward.answer_after: null, and") for line in lines] == [True] * warns
    assert all(line.endswith("env.reward.answer_after=</think> compares only the text after it") for line in lines)
    assert list(scored_thinking(config, plain)) == []
