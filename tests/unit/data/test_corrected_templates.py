# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Templates of ours: the published texts wherever those are whole, and by hand what they add."""

import json
import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from io import StringIO
from typing import Any

import pytest
from jinja2 import Environment
from transformers import PreTrainedTokenizerBase

from nemo_rl_moe.config.schema_policy import TokenizerConfig
from nemo_rl_moe.data.chat_template import template_setup
from nemo_rl_moe.data.corrected_templates import CORRECTED, correct_template
from nemo_rl_moe.data.left_out import require_all_shown
from nemo_rl_moe.data.template_renderer import Rendered, TemplateRenderer
from nemo_rl_moe.data.turn_spans import RenderError
from nemo_rl_moe.launch.setup import use_corrected_template
from nemo_rl_moe.runs.loggers.console import ConsoleLogger
from tests.support.chat_templates import make_byte_tokenizer
from tests.support.published_templates import PUBLISHED, SPECIAL_TOKENS, WIDE_BAR

TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
OURS = dict(zip(PUBLISHED, CORRECTED, strict=True))
WORDS = ("alpha", "It is 3.", " lead", "trail\n", "n\u00e9e \U0001f600", '{"k": "v"}', "assistant", "<b>")


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, *arguments: dict[str, Any], **more: str) -> dict[str, Any]:
    calls = [
        {"id": f"abcdefgh{i}", "type": "function", "function": {"name": "add", "arguments": given}}
        for i, given in enumerate(arguments)
    ]
    return {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {}), **more}


def result(text: str, place: int = 0) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"abcdefgh{place}", "name": "add", "content": text}


SYSTEM = {"role": "system", "content": "Be brief."}


def tokenizer_of(name: str) -> PreTrainedTokenizerBase:
    begin, end, *more = SPECIAL_TOKENS[name.partition("-")[0].partition(" ")[0]]
    return make_byte_tokenizer(PUBLISHED[name], more_special=(begin, end, *more), bos_token=begin, eos_token=end)


@cache
def renderers(name: str) -> tuple[TemplateRenderer, TemplateRenderer]:
    """The published template's, and ours."""
    published = template_setup(tokenizer_of(name), with_tools=False)
    ours = replace(published, template=OURS[name].text())
    return TemplateRenderer(published), TemplateRenderer(ours)


def rendered(renderer: TemplateRenderer, *turns: dict[str, Any], **request: Any) -> Rendered:
    is_prompt = turns[-1]["role"] != "assistant"
    trained = None if is_prompt else [place for place, turn in enumerate(turns) if turn["role"] == "assistant"]
    return renderer.render(turns, request.get("tools"), request.get("kwargs", {}), trained=trained)


def marked(renderer: TemplateRenderer, *turns: dict[str, Any]) -> str:
    """The text with plain bars, and what is trained on between brackets."""
    text, spans = (found := rendered(renderer, *turns)).text, found.spans
    for first, end in reversed(spans):
        text = f"{text[:first]}\u27ea{text[first:end]}\u27eb{text[end:]}"
    return text.replace(WIDE_BAR, "|")


def whole_conversation(source: random.Random, name: str) -> tuple[list[dict[str, Any]], list[Any] | None]:
    """A conversation of which the published template loses nothing: calls once, thinking only in earlier turns."""

    def text() -> str:
        return " ".join(source.choice(WORDS) for _ in range(source.randint(1, 3)))

    is_mistral, ends_in_answer = name.startswith("Mistral"), source.random() < 0.7
    has_calls = source.random() < 0.6 and not name.startswith("Kimi")
    turns = [SYSTEM] if source.random() < 0.5 and not (is_mistral and (has_calls or ends_in_answer)) else []
    rounds = source.randint(1, 3)
    for place in range(rounds):
        turns.append(user(f"{place} {text()}"))
        if has_calls and place == rounds - 1:
            arguments = [{"a": text()} for _ in range(source.randint(1, 2))]
            turns.append(assistant("" if is_mistral else source.choice(["", text()]), *arguments))
            turns += [result(text(), i) for i in range(len(arguments))]
        if place < rounds - 1 or ends_in_answer:
            thinks = place < rounds - 1 and source.random() < 0.5 and name != "Kimi-K2-Thinking"
            thinking = "<think>\nr\n</think>\n\n" if thinks else ""
            turns.append(assistant(thinking + text()))
    return turns, [TOOL] if is_mistral and has_calls else None


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_text_wherever_it_is_whole(name: str) -> None:
    published, ours = renderers(name)
    kinds = set()
    for seed in range(80):
        turns, tools = whole_conversation(random.Random(seed), name)
        assert rendered(ours, *turns, tools=tools) == rendered(published, *turns, tools=tools), turns
        kinds.add((len(turns), turns[-1]["role"]))
    assert len(kinds) >= 12


ASSISTANT, END = "<|Assistant|>", "<|end▁of▁sentence|>"


def shown_call(number: int) -> str:
    arguments = json.dumps({"a": number})
    return f"<|tool▁call▁begin|>function<|tool▁sep|>add\n```json\n{arguments}\n```<|tool▁call▁end|>"


def test_every_turn_that_calls_opens_and_closes_its_calls() -> None:
    published, ours = renderers("DeepSeek-V3")
    turns = [
        *(user("q"), assistant("", {"a": 1}, {"a": 2}), result("r0"), result("r1", 1)),
        *(
            assistant("so", {"a": 3}),
            result("r2"),
            assistant("x</think>a"),
            user("q2"),
            assistant("", {"a": 4}),
            result("r3"),
        ),
        *(user("q3"), assistant("b")),
    ]
    with pytest.raises(RenderError, match="cannot be distinguished from the rest"):
        rendered(published, *turns)
    calls, close = ("<|tool▁calls▁begin|>", f"<|tool▁calls▁end|>{END}")
    assert marked(ours, *turns) == (
        f"<|begin▁of▁sentence|><|User|>q{ASSISTANT}"
        f"\u27ea{calls}{shown_call(1)}\n{shown_call(2)}{close}\u27eb"
        "<|tool▁outputs▁begin|><|tool▁output▁begin|>r0<|tool▁output▁end|>"
        "<|tool▁output▁begin|>r1<|tool▁output▁end|><|tool▁outputs▁end|>"
        f"\u27easo{calls}{shown_call(3)}{close}\u27eb"
        "<|tool▁outputs▁begin|><|tool▁output▁begin|>r2<|tool▁output▁end|><|tool▁outputs▁end|>"
        f"\u27eax</think>a{END}\u27eb<|User|>q2{ASSISTANT}"
        f"\u27ea{calls}{shown_call(4)}{close}\u27eb"
        "<|tool▁outputs▁begin|><|tool▁output▁begin|>r3<|tool▁output▁end|><|tool▁outputs▁end|>"
        f"<|User|>q3{ASSISTANT}\u27eab{END}\u27eb"
    )


@pytest.mark.parametrize(
    "last",
    [assistant("<think>\nr2\n</think>\n\na2"), assistant("a2", reasoning_content="r2"), assistant("a2", thinking="r2")],
)
def test_thinking_behind_a_prompt_that_opens_it(last: dict[str, Any]) -> None:
    published, ours = renderers("DeepSeek-R1")
    turns = [user("q1"), assistant("<think>\nr1\n</think>\n\na1"), user("q2")]
    assert rendered(ours, *turns).text.endswith(f"q2<{WIDE_BAR}Assistant{WIDE_BAR}><think>\n")
    with pytest.raises(RenderError, match=r"^turn 3 has thinking, and the chat template shows none of it; "):
        rendered(published, *turns, last)
    assert marked(ours, *turns, last) == (
        f"<|begin▁of▁sentence|><|User|>q1{ASSISTANT}\u27ea\n\na1{END}\u27eb<|User|>q2{ASSISTANT}<think>\n"
        f"\u27ear2\n</think>\n\na2{END}\u27eb"
    )
    with pytest.raises(RenderError, match="has thinking"):
        rendered(renderers("DeepSeek-V3")[1], *turns, last)


@pytest.mark.parametrize("name", ["thinking", "enable_thinking"])
@pytest.mark.parametrize("last", [assistant("<think>\nr\n</think>a2"), assistant("a2", reasoning_content="r")])
def test_thinking_of_a_model_that_can_think(name: str, last: dict[str, Any]) -> None:
    published, ours = renderers("DeepSeek-V3.1")
    turns = [user("q1"), assistant("<think>x</think>a1"), user("q2"), last]
    for renderer, kwargs in ((published, {name: True}), (ours, {})):
        with pytest.raises(RenderError, match=r"^turn 3 has thinking, and the chat template shows none of it; "):
            rendered(renderer, *turns, kwargs=kwargs)
    found = rendered(ours, *turns, kwargs={name: True})
    assert [found.text[first:end].replace(WIDE_BAR, "|") for first, end in found.spans] == [
        f"</think>a1{END}",
        f"r</think>a2{END}",
    ]
    assert found.text.startswith(rendered(ours, *turns[:3], kwargs={name: True}).text)


def test_the_system_turn_stands_in_what_is_trained_on() -> None:
    published, ours = renderers("Mistral")
    turns = [SYSTEM, user("q1"), assistant("a1"), user("q2"), assistant("", {"a": 1}), result("1"), assistant("a2")]
    with pytest.raises(RenderError, match=r"^turn 0 is of role system, and the chat template leaves it out; "):
        rendered(published, *turns)
    assert marked(ours, *turns) == (
        "<s>[INST] q1[/INST]\u27ea a1</s>\u27eb[INST] Be brief.\n\nq2[/INST]"
        '\u27ea[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "abcdefgh0"}]</s>\u27eb'
        '[TOOL_RESULTS] {"content": 1, "call_id": "abcdefgh0"}[/TOOL_RESULTS]\u27ea a2</s>\u27eb'
    )
    # The turn that is answered last stands there as in the prompt that the model answers.
    prompt = rendered(published, *turns[:4]).text
    assert rendered(ours, *turns).text.startswith(prompt)


KIMI_SYSTEM = "<|im_system|>system<|im_middle|>You are Kimi, an AI assistant created by Moonshot AI.<|im_end|>"
KIMI_USER, KIMI_ASSISTANT = "<|im_user|>user<|im_middle|>", "<|im_assistant|>assistant<|im_middle|>"


def kimi_call(number: int, value: int) -> str:
    arguments = json.dumps({"a": value})
    return f"<|tool_call_begin|>functions.add:{number}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def test_calls_that_the_sandbox_refuses() -> None:
    published, ours = renderers("Kimi-K2")
    turns = [
        *(user("q"), assistant("so", {"a": 1}, {"a": 2}), result("r0"), result("r1", 1)),
        *(assistant("", {"a": 3}), result("r2"), assistant("x")),
    ]
    with pytest.raises(RenderError, match="'append' of 'list' object is unsafe"):
        rendered(published, *turns)
    begin, end = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|><|im_end|>"
    assert marked(ours, *turns) == (
        f"{KIMI_SYSTEM}\n{KIMI_USER}q<|im_end|>"
        f"{KIMI_ASSISTANT}\u27easo{begin}{kimi_call(0, 1)}{kimi_call(1, 2)}{end}\u27eb"
        "<|im_system|>add<|im_middle|>## Return of functions.add:0\nr0<|im_end|>"
        "<|im_system|>add<|im_middle|>## Return of functions.add:1\nr1<|im_end|>"
        f"{KIMI_ASSISTANT}\u27ea{begin}{kimi_call(2, 3)}{end}\u27eb"
        "<|im_system|>add<|im_middle|>## Return of functions.add:2\nr2<|im_end|>"
        f"{KIMI_ASSISTANT}\u27eax<|im_end|>\u27eb"
    )


@pytest.mark.parametrize("last", [assistant("a", reasoning_content="r"), assistant("<think>r</think>a")])
def test_thinking_of_an_only_answer(last: dict[str, Any]) -> None:
    published, ours = renderers("Kimi-K2-Thinking")
    with pytest.raises(RenderError, match=r"^turn 1 has thinking, and the chat template shows none of it; "):
        rendered(published, user("q"), last)
    text = f"{KIMI_SYSTEM}{KIMI_USER}q<|im_end|>{KIMI_ASSISTANT}"
    assert marked(ours, user("q"), last) == f"{text}\u27ea<think>r</think>a<|im_end|>\u27eb"
    # A question behind it drops the thinking, in both.
    prompt = rendered(published, user("q"), last, user("q2"))
    assert rendered(ours, user("q"), last, user("q2")) == prompt
    assert prompt.text == f"{text}<think></think>a<|im_end|>{KIMI_USER}q2<|im_end|>{KIMI_ASSISTANT}"


SHOWS_DEFAULT = (
    "{%- if messages[0].role != 'system' %}[You help.]{%- endif %}"
    "{%- for message in messages %}[{{ message.content }}]{%- endfor %}"
)
DROPS_SYSTEM = "{%- for message in messages if message.role != 'system' %}[{{ message.content }}]{%- endfor %}"
LONG = "Answer every question in one short sentence, and say so."


@pytest.mark.parametrize(
    ("template", "system", "question", "is_shown"),
    [
        (SHOWS_DEFAULT, "You help.", "q", True),
        (SHOWS_DEFAULT, LONG, "q", True),
        (SHOWS_DEFAULT, LONG, f"Why: {LONG}", True),
        (DROPS_SYSTEM, "You help.", "q", False),
        (DROPS_SYSTEM, LONG, "q", False),
        (DROPS_SYSTEM, LONG, f"Why: {LONG}", False),
    ],
)
def test_a_turn_is_shown_where_another_in_its_place_would_be(
    template: str, system: str, question: str, is_shown: bool
) -> None:
    """Also one that the template shows by default, and not one that only another turn quotes."""

    def render(messages: Sequence[dict[str, Any]]) -> str:
        return str(Environment().from_string(template).render(messages=messages))

    turns = [{"role": "system", "content": system}, user(question), assistant("a")]
    with nullcontext() if is_shown else pytest.raises(RenderError, match=r"^turn 0 is of role system, and the chat"):
        require_all_shown(turns, render(turns), render)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_template_is_recognised(name: str) -> None:
    tokenizer = tokenizer_of(name)
    line = correct_template(tokenizer, "auto")
    assert line == (
        f"chat template: that of {OURS[name].family} loses {OURS[name].loses}; {OURS[name].file} of this"
        " package replaces it (policy.tokenizer.corrected_template=never keeps the model's)"
    )
    assert tokenizer.chat_template == OURS[name].text()


@pytest.mark.parametrize(
    "changed",
    [
        PUBLISHED["DeepSeek-R1"].replace("User", "Human"),
        PUBLISHED["DeepSeek-R1"].replace("\\n```json", " ```json"),
        PUBLISHED["DeepSeek-R1"].replace("m.role == 'system'", "m.role == 'developer'"),
        PUBLISHED["Mistral"].replace("[/INST]", " [/INST]"),
        PUBLISHED["Kimi-K2"].replace("You are Kimi", "You are Kimo"),
        "{{ '[AVAILABLE_TOOLS]' }}{% for %}",
        "{{ raise_exception('[AVAILABLE_TOOLS]') }}",
    ],
)
def test_any_other_template_stays(changed: str) -> None:
    tokenizer = tokenizer_of("DeepSeek-R1" if WIDE_BAR in changed else "Kimi-K2" if "Kimo" in changed else "Mistral")
    tokenizer.chat_template = changed
    assert correct_template(tokenizer, "auto") is None
    assert tokenizer.chat_template == changed


@pytest.mark.parametrize(("chat_template", "setting"), [(None, "never"), ("mine.jinja", "auto")])
def test_the_key_and_a_template_of_the_users_own_win(chat_template: str | None, setting: str) -> None:
    reported = StringIO()
    settings = TokenizerConfig.model_validate(
        {"name": "t", "chat_template": chat_template, "corrected_template": setting}
    )
    use_corrected_template(
        tokenizer := tokenizer_of("Mistral"), settings, ConsoleLogger(0, live="never", stream=reported)
    )
    assert tokenizer.chat_template == PUBLISHED["Mistral"]
    assert reported.getvalue() == ""
