# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A conversation with tools in the token format of each family: what is trained on is what the assistant wrote.

The formats are those that the families' model cards and technical reports publish.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from nemo_rl_moe import cli
from tests.support.chat_templates import make_byte_tokenizer
from tests.support.tool_templates import FAMILIES, ToolFormat

MODEL = Path(__file__).resolve().parents[3] / "examples/assets/tiny_qwen3_moe"
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}},
}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
MESSAGES = [
    {"role": "user", "content": "1+2?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "abcdefghi", "name": "add", "content": "3"},
    {"role": "assistant", "content": "It is 3."},
    {"role": "user", "content": "Thanks."},
    {"role": "assistant", "content": "Welcome."},
]


def in_parts(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose text is cut into a list of parts, in its middle."""
    text = message["content"]
    if text is None:
        return message
    middle = len(text) // 2
    return {**message, "content": [{"type": "text", "text": piece} for piece in (text[:middle], text[middle:])]}


FORMS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {"text": lambda message: message, "parts": in_parts}
"""Contents of messages as texts, and as lists of parts, of which no family's template need know."""


def tokenizer_of(family: ToolFormat) -> PreTrainedTokenizerBase:
    """A byte-level tokenizer in which the family's special tokens are one token each."""
    return make_byte_tokenizer(family.template, more_special=family.special_tokens, eos_token=family.end_token)


@pytest.fixture
def shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[PreTrainedTokenizerBase, str], str]:
    """Return what `nemo-rl-moe data` prints of the conversation in a form."""

    def show(tokenizer: PreTrainedTokenizerBase, form: str) -> str:
        tokenizer.save_pretrained(tmp_path / "tokenizer")
        path = tmp_path / "train.jsonl"
        path.write_text(
            json.dumps({"messages": [FORMS[form](message) for message in MESSAGES], "tools": [TOOL]}) + "\n"
        )
        words = [
            *("data", "--config", "sft_tiny_moe.yaml", f"policy.model_name={MODEL}", "policy.init=random"),
            *(f"policy.tokenizer.name={tmp_path / 'tokenizer'}", "policy.max_total_sequence_length=4000"),
            *(f"data.train.path={path}", "data.validation=null"),
        ]
        assert cli.main(words) == 0
        output, errors = capsys.readouterr()
        assert errors == ""
        # Qwen3's last turn opens an empty block.
        title = re.compile(r" to train on(, with an empty <think> block that is trained on)?\n")
        return output[title.search(output).end() :].rstrip("\n")

    return show


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_trained_on_is_what_the_assistant_wrote(name: str, form: str, shown: Callable[..., str]) -> None:
    family = FAMILIES[name]
    tokenizer = tokenizer_of(family)
    text = shown(tokenizer, form)
    trained = [piece.partition("]]")[0] for piece in text.split("[[")[1:]]
    assert trained == list(family.trained)
    # The rest, and nothing else, is context: definitions, questions, results, headers.
    # Not by `apply_chat_template`: since transformers 5.24 it drops the null content that DeepSeek-V3's template needs.
    (whole,), _ = render_jinja_template(
        conversations=[family.as_template_wants(MESSAGES)],
        tools=[TOOL],
        chat_template=tokenizer.chat_template,
        **tokenizer.special_tokens_map,
    )
    assert text.replace("[[", "").replace("]]", "") == whole.rstrip("\n")
    assert json.dumps(TOOL["function"]["parameters"]) in text  # type: ignore[index]
