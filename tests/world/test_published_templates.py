# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Published chat templates: what is trained on is what the model wrote, or the conversation is refused with a cure."""

import json
import random
import re
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest
import yaml
from jinja2 import Environment
from transformers.utils.chat_template_utils import render_jinja_template

from nemo_rl_moe.data.chat_template import text_renderer_for
from nemo_rl_moe.data.continuation import Continuation, SampledTurn
from nemo_rl_moe.data.left_out import EARLIER_THINKING, TEXT_BESIDE_CALLS
from nemo_rl_moe.data.template_inputs import TemplateInputs
from nemo_rl_moe.data.template_renderer import Rendered
from nemo_rl_moe.data.turn_glue import Rewritten
from nemo_rl_moe.data.turn_spans import UNPROMPTED
from tests.world.conftest import Published
from tests.world.conversations import Message, system, user
from tests.world.published_chats import CASES, TOOL, PublishedChat, assistant, result

REFUSED: dict[str, Collection[str]] = {
    "DeepSeek-R1-Distill-Qwen-32B": ("think", "reason", "tool", "calls"),
    "DeepSeek-V3.1": ("think", "reason", "tool", "calls"),  # thinking is off; definitions of tools
    "DeepSeek-V3.2": ("think", "reason"),
    "GLM-4.6": (),
    "GLM-4.7-Flash": (),
    "Kimi-K2-Instruct": ("reason",),
    "Kimi-K2-Thinking": (),
    "Llama-3.1-8B-Instruct": ("reason", "calls"),
    "MiniMax-M2": (),
    "Mistral-Nemo-Instruct-2407": ("reason",),
    "Qwen2.5-7B-Instruct": ("reason",),
    "Qwen3-0.6B": (),
    "Qwen3-Coder": ("reason",),
    "Qwen3.5-4B": (),
    "gpt-oss-120b": ("calls",),
    "glm4moe": (),
    "qwen2_5_vl": ("reason", "tool", "calls"),
    "qwen3_5_think": (),
    "qwen3_5_nothink": ("think", "reason"),
    "qwen3_6": (),
    "qwen3_instruct_2507": ("reason",),
    "qwen3_vl": ("reason",),
}
"""What templates of supported families do not show, so that it is refused; by the end of the template's name."""
CURE = re.compile(r"it works with data\.chat_template_kwargs: (\{.*\})$")
TAGS = re.compile(r"\{%-?\s*generation\s*-?%\}")
NUM_TEMPLATES = {"llama-cpp-python": 70, "trl": 41}


def templates(folder: Path) -> Iterator[Path]:
    return (file for file in sorted(folder.glob("*.jinja")) if not file.stem.endswith("_training"))


def words_of(message: Message, pattern: str) -> set[str]:
    return set(re.findall(pattern, json.dumps(message)))


def faults(found: Rendered, case: str) -> list[str]:
    """Words of the model outside of the spans without a note, and others' within."""
    inside = "\n".join(found.text[first:end] for first, end in found.spans)
    own = {word for turn in CASES[case] if turn["role"] == "assistant" for word in words_of(turn, r"[A-Z]{3}[0-9ab]")}
    others = {word for turn in CASES[case] if turn["role"] != "assistant" for word in words_of(turn, r"[A-Z]{3}[0-9]")}
    noted = {"THK1"} if EARLIER_THINKING in found.notes else set()
    noted |= {"PRE1"} if TEXT_BESIDE_CALLS in found.notes else set()
    return [
        *(f"{word} is not trained on" for word in sorted(own - noted) if word not in inside),
        *(f"{word} is trained on" for word in sorted(others) if word in inside),
    ]


@pytest.mark.parametrize("folder", NUM_TEMPLATES)
def test_nothing_is_wrong_in_silence(published: Published, folder: str) -> None:
    wrong, files = [], list(templates(published(folder)))
    for file in files:
        chat = PublishedChat.read(file)
        render = text_renderer_for(chat.tokenizer)
        for case, messages in CASES.items():
            found = chat.rendered(case)
            if isinstance(found, str):
                if "policy.tokenizer.chat_template" not in found and "it works with" not in found:
                    wrong.append((file.stem, case, found))
                if (cure := CURE.search(found)) is not None:
                    cured = chat.rendered(case, **yaml.safe_load(cure[1]))
                    wrong += [(file.stem, case, cured)] if isinstance(cured, str) else []
                continue
            wrong += [(file.stem, case, fault) for fault in faults(found, case)]
            first = next(place for place, turn in enumerate(messages) if turn["role"] == "assistant")
            inputs = TemplateInputs((TOOL,) if case in ("tool", "calls") else None)
            # The first turn answers its prompt, or a note says that it does not.
            if UNPROMPTED not in found.notes and TAGS.search(chat.tokenizer.chat_template) is None:
                prompt = render(messages[:first], inputs).partition("USR1")[2]
                if found.text[: found.spans[0][0]].partition("USR1")[2] != prompt:
                    wrong.append((file.stem, case, f"does not stand behind {prompt[-40:]!r}"))
    assert wrong == [], wrong
    assert len(files) == NUM_TEMPLATES[folder]


def published_file(published: Published, name: str) -> Path:
    files = [*templates(published("llama-cpp-python")), *templates(published("trl"))]
    return next(file for file in files if file.stem == name or file.stem.endswith(f"-{name}"))


@pytest.mark.parametrize("name", REFUSED)
def test_supported_families(published: Published, name: str) -> None:
    chat = PublishedChat.read(published_file(published, name))
    refused = {case for case in CASES if isinstance(chat.rendered(case), str)}
    assert refused == set(REFUSED[name])


@pytest.mark.parametrize("name", ["Kimi-K2-Instruct", "Kimi-K2-Thinking", "DeepSeek-V3.1"])
def test_a_corrected_template_gives_the_published_text(published: Published, name: str) -> None:
    """Rendered without the sandbox, which refuses Kimi-K2's own."""
    file = published_file(published, name)
    chat = PublishedChat.read(file)
    assert chat.is_corrected
    environment = Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    own = environment.from_string(file.read_text(encoding="utf-8"))
    num_compared = 0
    for seed in range(200):
        turns = conversation_of(random.Random(seed))
        is_prompt = turns[-1]["role"] != "assistant"
        answers = [
            place for place, turn in enumerate(turns) if turn["role"] == "assistant" and "tool_calls" not in turn
        ]
        if name == "Kimi-K2-Thinking" and answers == [len(turns) - 1]:
            continue  # an only answer: ours keeps its thinking
        tools = None if name == "DeepSeek-V3.1" else [TOOL]
        names = {"tools": tools, "add_generation_prompt": is_prompt, "bos_token": "<s>"}
        texts = render_jinja_template(conversations=[turns], chat_template=chat.tokenizer.chat_template, **names)[0]
        assert texts[0] == own.render(messages=turns, **names)
        num_compared += 1
    assert num_compared > 100


def conversation_of(source: random.Random) -> list[Message]:
    turns = [system("SYS0")] if source.random() < 0.5 else []
    rounds = source.randint(1, 3)
    for number in range(rounds):
        turns.append(user(f"USR{number}"))
        thought = {"reasoning_content": "THK1"} if source.random() < 0.5 else {}
        for _ in range(source.randint(0, 2)):
            cities = ["ARGa", "ARGb"][: source.randint(1, 2)]
            turns.append(assistant(source.choice(["", "PRE1"]), *cities, **thought))
            turns += [result(place) for place in range(1, len(cities) + 1)]
        if number < rounds - 1 or source.random() < 0.5:
            turns.append(assistant("ANS1", **thought))
    return turns


CONTINUED = {
    "GLM-4.7-Flash": ("<|observation|>", "<|user|>"),
    "Kimi-K2-Instruct": ("<|im_end|>",) * 2,
    "Kimi-K2-Thinking": ("<|im_end|>",) * 2,
    "MiniMax-M2": ("[e~[",) * 2,
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("<|im_end|>",) * 2,
    "Qwen3-0.6B": ("<|im_end|>",) * 2,
    "Qwen3.5-4B": ("<|im_end|>",) * 2,
    "qwen3_6": ("<|im_end|>",) * 2,
}
"""The tokens that end a turn of calls, and an answer."""


@pytest.mark.parametrize("name", CONTINUED)
def test_results_of_tools_are_appended_to_the_token(published: Published, name: str) -> None:
    chat = PublishedChat.read(published_file(published, name))
    tokenizer, inputs = chat.tokenizer, TemplateInputs((TOOL,))
    render, continuation = text_renderer_for(tokenizer), Continuation(tokenizer)
    stops = [tokenizer.convert_tokens_to_ids(stop) for stop in chat.stops]
    fresh: list[Message] = [user("USR1")]
    begun = continuation.begin(fresh, inputs)
    ids, before, text = list(begun.token_ids), begun.messages, begun.text
    thinks = name != "Kimi-K2-Instruct"
    for number in (1, 2, 3):
        thought = {"reasoning_content": f"THK{number}"} if thinks else {}
        call = assistant("" if number == 1 else f"PRE{number}", "ARGa", **thought)
        answer = result(1)
        whole = [*fresh, call, answer]
        shown, prompt = render(whole, inputs), render(fresh, inputs)
        assert shown.startswith(prompt)
        end = CONTINUED[name][0]
        own = shown[len(prompt) : shown.index(end, len(prompt)) + len(end)]
        assert ("</think>" in own) == thinks
        sampled = tokenizer(own, add_special_tokens=False)["input_ids"]
        found = continuation.extend(SampledTurn(before, sampled, stops, inputs, text), [answer])
        ids += [*sampled, *found.token_ids]
        assert tokenizer.decode(ids) == shown
        fresh, before, text = whole, found.messages, found.text


@pytest.mark.parametrize("name", [name for name in CONTINUED if name not in ("Kimi-K2-Instruct",)])
def test_a_question_begins_anew_where_the_template_drops_thinking(published: Published, name: str) -> None:
    chat = PublishedChat.read(published_file(published, name))
    tokenizer, inputs = chat.tokenizer, TemplateInputs()
    continuation = Continuation(tokenizer)
    begun = continuation.begin([user("USR1")], inputs)
    stops = [tokenizer.convert_tokens_to_ids(stop) for stop in chat.stops]
    opened = "" if begun.text.rstrip().endswith("<think>") else "<think>"
    own = f"{opened}THK1</think>ANS1{CONTINUED[name][1]}"
    sampled = tokenizer(own, add_special_tokens=False)["input_ids"]
    turn = SampledTurn(begun.messages, sampled, stops, inputs, begun.text)
    with pytest.raises(Rewritten):
        continuation.extend(turn, [user("USR2")])
    anew = continuation.begin_anew(turn, [user("USR2")], 1)
    conversation = [user("USR1"), assistant("<think>THK1</think>ANS1"), user("USR2")]
    assert tokenizer.decode(list(anew.token_ids)) == text_renderer_for(tokenizer)(conversation, inputs)
