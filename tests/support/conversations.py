# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Random conversations under every chat template that the tests have, rendered afresh at each turn."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from nemo_rl_moe.data.corrected_templates import CORRECTED
from nemo_rl_moe.data.tokenizer import load_tokenizer
from tests.support.byte_tokenizer import make_byte_tokenizer
from tests.support.chat_templates import CHANNELS, NEWLINE_BETWEEN_TURNS, PROMPT_OPENS_THINKING, THINKING
from tests.support.published_templates import PUBLISHED, SPECIAL_TOKENS
from tests.support.tool_templates import FAMILIES

ASSETS = Path(__file__).parents[2] / "examples/assets"
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
WORDS = ("alpha", "It is 3.", "n\u00e9e \U0001f600", '{"k": "v"}', "assistant", "<b>", "two\nlines")
Message = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """A tokenizer with a chat template.

    Attributes:
        ends: Tokens that end the model's turns.
        words: What its conversations are made of.
        shows_tools: The template shows definitions of tools.
        shows_results: It knows turns that call, and role tool.
    """

    tokenizer: PreTrainedTokenizerBase
    ends: tuple[str, ...]
    words: tuple[str, ...] = WORDS
    shows_tools: bool = True
    shows_results: bool = True

    @property
    def end_ids(self) -> tuple[int, ...]:
        return tuple(self.tokenizer.convert_tokens_to_ids(end) for end in self.ends)

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> str:
        """Render with the generation prompt; templates differ in the form of calls that they take."""
        forms = [list(messages), [_with_text_arguments(message) for message in messages]]
        for form in forms:
            try:
                return str(
                    self.tokenizer.apply_chat_template(form, tools=tools, tokenize=False, add_generation_prompt=True)
                )
            except Exception as error:  # a template may fail in any way that Python knows
                problem = error
        raise problem


class Conversation:
    """A conversation that grows by a turn of the model and what answers it.

    Attributes:
        messages: The prompt at first, then all turns.
        new: What answered the last turn.
        text: A fresh rendering of all of it, with the generation prompt.
    """

    def __init__(self, family: Family, source: random.Random, tools: Sequence[Mapping[str, Any]] | None):
        self._family, self._source, self._tools = family, source, tools
        self.messages: list[Message] = [{"role": "user", "content": self._words()}]
        self.new: list[Message] = []
        self.text = family.render(self.messages, tools)

    def advance(self, role: str) -> str | None:
        """Add a turn and an answer from a role.

        Returns:
            What the model has to write, its end token included, for the new rendering to come about; None: no text
            does, because the template renders what was there in another way.
        """
        turn, self.new = self._question() if role == "user" else self._call()
        before = self.text
        self.messages = [*self.messages, turn, *self.new]
        self.text = self._family.render(self.messages, self._tools)
        added = self.text[len(before) :]
        places = [added.index(end) + len(end) for end in self._family.ends if end in added]
        return added[: min(places)] if self.text.startswith(before) and places else None

    def _words(self) -> str:
        return " ".join(self._source.choice(self._family.words) for _ in range(self._source.randint(1, 3)))

    def _question(self) -> tuple[Message, list[Message]]:
        return {"role": "assistant", "content": self._words()}, [{"role": "user", "content": self._words()}]

    def _call(self) -> tuple[Message, list[Message]]:
        name = "abcdefghi"
        call = {"id": name, "type": "function", "function": {"name": "add", "arguments": {"a": self._words()}}}
        result = {"role": "tool", "tool_call_id": name, "name": "add", "content": self._words()}
        return {"role": "assistant", "content": "", "tool_calls": [call]}, [result]


def _with_text_arguments(message: Message) -> Message:
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "content": None, "tool_calls": calls}


def _families() -> dict[str, Family]:
    found = {}
    for name, family in FAMILIES.items():
        tokenizer = make_byte_tokenizer(family.template, more_special=family.special_tokens, eos_token=family.end_token)
        found[name] = Family(tokenizer, (family.end_token, *(["<|call|>"] if name == "gpt-oss" else [])))
    for (name, published), ours in zip(PUBLISHED.items(), CORRECTED, strict=True):
        begin, end, *more = SPECIAL_TOKENS[name.partition("-")[0].partition(" ")[0]]
        for kind, template in (("published", published), ("corrected", ours.text())):
            tokenizer = make_byte_tokenizer(template, more_special=(begin, end, *more), bos_token=begin, eos_token=end)
            found[f"{kind} {name}"] = Family(
                tokenizer,
                (end,),
                shows_tools=name.startswith(("Mistral", "Kimi")),
                shows_results=kind == "corrected" or not name.startswith("Kimi"),
            )
    found["THINKING"] = Family(make_byte_tokenizer(THINKING), ("<|end|>",))
    found["PROMPT_OPENS_THINKING"] = Family(make_byte_tokenizer(PROMPT_OPENS_THINKING), ("<|end|>",), shows_tools=False)
    found["NEWLINE_BETWEEN_TURNS"] = Family(
        make_byte_tokenizer(NEWLINE_BETWEEN_TURNS), ("<|end|>",), shows_tools=False, shows_results=False
    )
    found["CHANNELS"] = Family(make_byte_tokenizer(CHANNELS, more_special=["<call>"]), ("<|end|>", "<call>"))
    for name, words in (
        ("tiny_qwen3_moe", ("12+3=", "how many", "15")),
        ("tiny_internvl_moe", (" red dots ", " 7 ", " left ")),
        ("tiny_qwen3_vl_moe", (" red dots ", " 7 ", " left ")),
    ):
        tokenizer = load_tokenizer(str(ASSETS / name))
        found[name] = Family(tokenizer, ("<eos>",), words, shows_tools=False, shows_results=False)
    found["tiny_qwen3_moe_tools"] = Family(load_tokenizer(str(ASSETS / "tiny_qwen3_moe_tools")), ("<|im_end|>",))
    return found


ALL = _families()
"""By a family's name, or that of the template or folder."""
