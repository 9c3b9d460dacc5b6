# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""How a model speaks: stop tokens of its files, and the ends of turns that are trained on, worked out by hand."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_rl_moe.data.chat import MERGED, TokenizedExample, batch_tokenizer
from nemo_rl_moe.data.preferences import load_preferences
from nemo_rl_moe.data.records import BadLine, parse_record
from nemo_rl_moe.data.speech import Published, Speech, StopToken, describe_speech, load_published
from nemo_rl_moe.data.thinking import Thinking
from nemo_rl_moe.data.turn_ends import UNTRAINED_END
from nemo_rl_moe.errors import ConfigurationError
from tests.support.chat_templates import (
    CHANNELS,
    CLOSED_BY_NEXT_ROLE,
    PROMPT_OPENS_THINKING,
    THINKING,
    make_byte_tokenizer,
)

MARKS = ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|system|>")
# Behind 256 bytes, `<|start|>`, `<|end|>` and `<s>`.
END, USER, OBSERVATION = 259, 260, 262
CHATML = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
TAGGED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
ANALYSIS = (
    "{% for m in messages %}{% if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "{{ m.content }}{% endfor %}"
)
THINK = Thinking("<think>", "</think>", "</think>")
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


CALL = {**assistant(""), "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]}
RESULT = {"role": "tool", "content": "2"}


def next_role_tokenizer() -> Any:
    return make_byte_tokenizer(CLOSED_BY_NEXT_ROLE, more_special=MARKS, eos_token="<|endoftext|>")


def speech_of(tokenizer: Any, generation: Any = None, config: Any = None) -> Speech:
    return describe_speech(tokenizer, Published({"eos_token_id": generation}, config or {}))


def trained(record: dict[str, Any], tokenizer: Any, speech: Speech | None) -> list[str]:
    """The text of each run of trained tokens."""
    (found,) = batch_tokenizer(tokenizer, 1000, speech=speech)([parse_record(record, "f:1")])
    assert isinstance(found, TokenizedExample), found
    edges = np.flatnonzero(np.diff(np.concatenate([[False], found.token_mask, [False]])))
    return [tokenizer.decode(found.input_ids[first:end]) for first, end in edges.reshape(-1, 2)]


def test_stop_tokens_of_all_files_each_with_its_sources() -> None:
    found = speech_of(next_role_tokenizer(), [END, USER], {"eos_token_id": [USER, OBSERVATION]})
    assert found.stop_tokens == (
        StopToken(END, "<|endoftext|>", ("tokenizer", "generation_config.json")),
        StopToken(USER, "<|user|>", ("generation_config.json", "config.json")),
        StopToken(OBSERVATION, "<|observation|>", ("config.json",)),
    )
    assert found.no_stops == ()
    assert (found.turn_end, found.call_end) == ("<|user|>", "<|observation|>")
    assert found.generation_prompt == "<|assistant|>\n"
    assert list(found.lines()) == [
        "stop tokens: '<|endoftext|>' 259 (tokenizer, generation_config.json), '<|user|>' 260"
        " (generation_config.json, config.json), '<|observation|>' 262 (config.json)",
        "the assistant's turns end with '<|user|>', of calls with '<|observation|>'; generation prompt"
        " '<|assistant|>\\n'",
    ]
    assert found.warnings() == []


def test_a_model_that_sees_has_them_in_its_text_configuration() -> None:
    found = speech_of(next_role_tokenizer(), None, {"text_config": {"eos_token_id": USER}})
    assert found.stop_token_ids == (END, USER)
    # The whole model's own are meant where it has some.
    both = {"eos_token_id": OBSERVATION, "text_config": {"eos_token_id": USER}}
    assert speech_of(next_role_tokenizer(), None, both).stop_token_ids == (END, OBSERVATION)


def test_a_token_that_the_template_writes_inside_a_turn_ends_none() -> None:
    tokenizer = make_byte_tokenizer(CHANNELS, more_special=("<call>",))
    end, inside, call = tokenizer.convert_tokens_to_ids(["<|end|>", "<s>", "<call>"])
    found = speech_of(tokenizer, [end, inside, call])
    assert found.stop_token_ids == (end, call)
    assert (found.turn_end, found.call_end) == ("<|end|>", "<call>")
    reason = "the chat template writes it inside a turn"
    assert found.no_stops == ((StopToken(inside, "<s>", ("generation_config.json",)), reason),)
    key = "policy.generation.stop_token_ids"
    line = f"no stop token: '<s>' {inside} (generation_config.json): {reason} ({key} sets the stop tokens)"
    assert line in found.lines()


def test_leftovers_of_a_configuration_are_no_stop_tokens() -> None:
    # The default 2 of many classes is a piece of plain text here; beyond the vocabulary there is nothing.
    found = speech_of(next_role_tokenizer(), None, {"eos_token_id": [2, 99_999]})
    assert found.stop_token_ids == (END,)
    assert [(token.token_id, reason) for token, reason in found.no_stops] == [
        (2, "it is a token of plain text"),
        (99_999, "the tokenizer has no such token"),
    ]


@pytest.mark.parametrize("value", ["</s>", [1, None], True, -1, 1.5])
def test_stop_tokens_that_are_no_ids(value: object) -> None:
    with pytest.raises(ConfigurationError, match=r"generation_config\.json: eos_token_id: got .*, expected a token id"):
        speech_of(next_role_tokenizer(), value)


def test_files_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 1}))
    assert load_published(str(tmp_path)) == Published({}, {"eos_token_id": 1})
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2]}))
    assert load_published(str(tmp_path)).generation == {"eos_token_id": [2]}
    (tmp_path / "generation_config.json").write_text("[1]")
    with pytest.raises(ConfigurationError, match=r"generation_config\.json is no object"):
        load_published(str(tmp_path))


def test_sampling_of_the_makers_and_several_templates() -> None:
    tokenizer = make_byte_tokenizer({"default": CHATML, "tool_use": CHATML})
    found = describe_speech(tokenizer, Published({"temperature": 0.6, "top_k": 20, "top_p": "x", "min_p": True}, {}))
    assert list(found.lines())[2:] == [
        "chat templates: default, tool_use; used: default, tool_use with tools",
        "the model's own sampling, not applied: temperature 0.6, top_k 20",
    ]


def test_a_template_that_ends_turns_with_none_of_the_stop_tokens() -> None:
    # As a base model's tokenizer with the template of a chat model.
    tokenizer = make_byte_tokenizer(CHATML, more_special=MARKS, eos_token="<|endoftext|>")
    (line,) = speech_of(tokenizer).warnings()
    assert line.startswith("the chat template ends the assistant's turns with none of the stop tokens '<|endoftext|>'")
    assert speech_of(tokenizer, 257).turn_end == "<|end|>"
    assert speech_of(tokenizer, 257).warnings() == []


def test_end_of_a_response_that_was_not_sampled() -> None:
    speech = speech_of(next_role_tokenizer(), [END, USER, OBSERVATION])
    assert speech.end_of_response((END, USER, OBSERVATION)) == (USER,)
    assert speech.end_of_response((OBSERVATION, END)) == (OBSERVATION,)
    assert speech.end_of_response(()) == ()


TURNS = [user("q1"), assistant("a1"), user("q2"), assistant("a2")]
CALLING = {"messages": [user("q"), CALL, RESULT, assistant("r")], "tools": [TOOL]}
WRITTEN_CALL = "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"messages": TURNS}, ["a1<|user|>", "a2<|user|>"]),
        ({"prompt": "q", "completion": "a"}, ["a<|user|>"]),
        ({"prompt": TURNS[:3], "completion": [TURNS[3]]}, ["a2<|user|>"]),
        ({"messages": [*TURNS, user("q3")]}, ["a1<|user|>", "a2<|user|>"]),
        (CALLING, [f"{WRITTEN_CALL}<|observation|>", "r<|user|>"]),
        ({**CALLING, "messages": CALLING["messages"][:2]}, [f"{WRITTEN_CALL}<|observation|>"]),
    ],
)
def test_the_mark_of_the_next_role_is_trained_where_generation_stops_at_it(record: Any, expected: list[str]) -> None:
    tokenizer = next_role_tokenizer()
    assert trained(record, tokenizer, speech_of(tokenizer, [END, USER, OBSERVATION])) == expected


def test_the_mark_stays_context_where_generation_does_not_stop_at_it() -> None:
    tokenizer = next_role_tokenizer()
    assert trained({"messages": TURNS}, tokenizer, None) == ["a1", "a2"]


@pytest.mark.parametrize(("inside", "outside"), [("<|end|>", ""), ("", "<|end|>"), ("", "\n<|end|>"), ("", "")])
def test_tags_decide_and_a_note_says_that_they_leave_the_end_out(inside: str, outside: str) -> None:
    answer = "{{ m.content }}"
    template = TAGGED.replace(f"{answer}{{% endgeneration %}}", f"{answer}{inside}{{% endgeneration %}}{outside}")
    tokenizer = make_byte_tokenizer(template)
    assert trained({"messages": TURNS}, tokenizer, None) == [f"a1{inside}", f"a2{inside}"]
    (found,) = batch_tokenizer(tokenizer, 1000)([parse_record({"messages": TURNS}, "f:1")])
    assert isinstance(found, TokenizedExample)
    assert found.notes == ((UNTRAINED_END,) if outside else ())


def test_both_responses_of_a_pair_have_it(tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"prompt": "q", "chosen": "a", "rejected": "b"}))
    tokenizer = next_role_tokenizer()
    speech = speech_of(tokenizer, [END, USER, OBSERVATION])
    (pair,) = load_preferences(str(tmp_path / "pairs.jsonl"), "train", tokenizer, 100, speech=speech)
    found = [example.input_ids[example.token_mask].tolist() for example in (pair.chosen, pair.rejected)]
    assert found == [[*tokenizer.encode("a"), USER], [*tokenizer.encode("b"), USER]]


def test_a_newline_behind_any_stop_token_belongs_to_no_turn() -> None:
    # The tokenizer's own end token is another one, as Kimi's.
    tokenizer = make_byte_tokenizer(CHATML, more_special=MARKS, eos_token="<|endoftext|>")
    assert trained({"messages": TURNS}, tokenizer, speech_of(tokenizer, 257)) == ["a1<|end|>", "a2<|end|>"]


def test_without_a_template_the_first_stop_token_ends_a_completion() -> None:
    tokenizer = make_byte_tokenizer(None, more_special=MARKS, eos_token=None)
    assert trained({"prompt": "q", "completion": "a"}, tokenizer, speech_of(tokenizer, USER)) == ["a<|user|>"]


@pytest.mark.parametrize("trim_offsets", [False, True])
@pytest.mark.parametrize(
    ("template", "merge", "prompt", "answer"),
    [
        (None, ("=", "4"), "2+2=", "4"),
        (TAGGED, ("=", "4"), "2+2=", "4"),
        # The generation prompt's newline and the answer's own.
        (CHATML, ("\u010a", "\u010a"), "q", "\na"),
        # Offsets may leave out blanks.
        (None, ("\u0120", "a"), "q ", "a"),
    ],
)
def test_no_token_holds_a_prompts_end_and_a_responses_start(
    template: str | None, merge: tuple[str, str], prompt: str, answer: str, trim_offsets: bool
) -> None:
    tokenizer = make_byte_tokenizer(template, merges=[merge], trim_offsets=trim_offsets)
    (found,) = batch_tokenizer(tokenizer, 100)([parse_record({"prompt": prompt, "completion": answer}, "f:1")])
    assert isinstance(found, TokenizedExample)
    begun = f"<|start|>user\n{prompt}<|end|>\n<|start|>assistant\n" if template == CHATML else prompt
    end = [] if template == TAGGED else [257 + 1]  # behind the merge
    before, own = (tokenizer.encode(text, add_special_tokens=False) for text in (begun, answer))
    assert found.input_ids[: len(before) + len(own) + len(end)].tolist() == [*before, *own, *end]
    assert found.input_ids[found.token_mask].tolist() == [*own, *end]
    assert found.notes == (MERGED,)


def test_merges_within_a_response_stay() -> None:
    tokenizer = make_byte_tokenizer(None, merges=[("=", "4")])
    (found,) = batch_tokenizer(tokenizer, 100)([parse_record({"prompt": "2", "completion": "=4"}, "f:1")])
    assert not isinstance(found, BadLine)
    assert [tokenizer.decode([token]) for token in found.input_ids] == ["2", "=4", "<|end|>"]
    assert found.notes == ()


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, None),
        (THINKING, THINK),
        (PROMPT_OPENS_THINKING, replace(THINK, is_opened=True)),
        (ANALYSIS, Thinking("<|channel|>analysis<|message|>", "<|end|>", "<|channel|>final<|message|>")),
        ("{{ messages[-1].content.split('</think>')[-1] }}", THINK),
    ],
)
def test_marks_of_thinking(template: str, expected: Thinking | None) -> None:
    found = describe_speech(make_byte_tokenizer(template))
    assert found.thinking == expected
    assert (f"thinking: {expected}" in found.lines()) == (expected is not None)


def test_marks_of_thinking_are_shown_with_who_opens_them() -> None:
    assert str(Thinking("<a>", "</a>", "</a>", is_opened=True)) == "'<a>' to '</a>', opened by the generation prompt"


def test_the_run_s_names_for_the_template_count() -> None:
    tokenizer = make_byte_tokenizer(
        PROMPT_OPENS_THINKING + "{%- if closed and add_generation_prompt %}{{- '</think>' }}{%- endif %}"
    )
    opened, closed = (describe_speech(tokenizer, kwargs={"closed": value}) for value in (False, True))
    assert opened.thinking == replace(THINK, is_opened=True)
    assert closed.thinking == THINK
    assert closed.generation_prompt.endswith("</think>")
