# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Conversations of each kind, and what published chat templates make of them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from nemo_rl_moe.data.chat_template import renderer_for
from nemo_rl_moe.data.corrected_templates import correct_template
from nemo_rl_moe.data.records import parse_record
from nemo_rl_moe.data.template_renderer import Rendered
from tests.support.chat_templates import make_byte_tokenizer
from tests.world.conversations import Message, system, user

BAR, BLOCK = "\uff5c", "\u2581"
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a place.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "c"},
                "days": {"type": "integer", "description": "d"},
            },
            "required": ["city"],
        },
    },
}


def assistant(text: str, *cities: str, **more: str) -> Message:
    calls = [
        {
            "id": f"abcdefgh{number}",
            "type": "function",
            "function": {"name": "get_weather", "arguments": {"city": city, "days": number}},
        }
        for number, city in enumerate(cities, start=1)
    ]
    return {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {}), **more}


def result(number: int) -> Message:
    return {"role": "tool", "tool_call_id": f"abcdefgh{number}", "name": "get_weather", "content": f"RES{number}"}


CASES: Mapping[str, Sequence[Message]] = {
    "chat": [system("SYS0"), user("USR1"), assistant("ANS1 x"), user("USR2"), assistant("ANS2 y")],
    "think": [
        *(user("USR1"), assistant("<think>\nTHK1\n</think>\n\nANS1")),
        *(user("USR2"), assistant("<think>\nTHK2\n</think>\n\nANS2")),
    ],
    "reason": [
        *(user("USR1"), assistant("ANS1", reasoning_content="THK1")),
        *(user("USR2"), assistant("ANS2", reasoning_content="THK2")),
    ],
    "tool": [
        *(user("USR1"), assistant("", "ARGa"), result(1), assistant("ANS1 z")),
        *(user("USR2"), assistant("ANS2 y")),
    ],
    "calls": [user("USR1"), assistant("PRE1", "ARGa", "ARGb"), result(1), result(2), assistant("ANS1 z")],
}
"""By kind; those with calls have a definition of the tool, too."""
_SPECIAL = re.compile(
    rf"<\|[A-Za-z0-9_ :]+\|>|<{BAR}[^>{BAR}'\" ]+{BAR}>|\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS"
    r"|TOOL_RESULTS|TOOL_CONTENT|ARGS|CALL_ID|THINK)\]|</?s>|<(?:start|end)_of_turn>|<\|?(?:turn|channel|tool_call"
    r"|tool_response)\|?>|<seed:[a-z_]+>|\]~!?b\]?|\[e~\[|<SPECIAL_[0-9]+>|<(?:beginning|end)_of_sentence>"
)
_ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>", "<|user|>", "<|observation|>", "</s>"),
    *(f"<{BAR}end{BLOCK}of{BLOCK}sentence{BAR}>", "<end_of_turn>", "<turn|>", "<|tool_response>", "<|calls|>"),
    *("<|END_OF_TURN_TOKEN|>", "<|end_of_text|>", "[e~[", "<seed:eos>", "<|assistant_end|>", "<|message_sep|>"),
    *("<SPECIAL_12>", "<end_of_sentence>", f"<{BAR}hy_eos:opensource{BAR}>"),
)


@dataclass(frozen=True)
class PublishedChat:
    """A published chat template on a tokenizer that has its special tokens.

    Attributes:
        stops: Tokens that end the model's turns, as the families' `generation_config.json` have them.
        is_corrected: A template of ours has taken its place.
    """

    tokenizer: PreTrainedTokenizerBase
    stops: tuple[str, ...]
    is_corrected: bool = False

    @classmethod
    def read(cls, file: Path) -> "PublishedChat":
        template = file.read_text(encoding="utf-8")
        special = sorted({*_SPECIAL.findall(template), "<s>", "</s>"})
        # In harmony <|end|> ends a message within a turn; elsewhere it ends the turn.
        ends = ("<|return|>", "<|call|>") if "<|return|>" in template else (*_ENDS, "<|end|>")
        is_role = "<|end|>" in template or "<|im_end|>" in template  # <|user|> is then a header and ends nothing
        stops = tuple(end for end in ends if end in special and end in template and not (is_role and end == "<|user|>"))
        stops = stops or ("</s>",)
        tokenizer = make_byte_tokenizer(template, more_special=special, eos_token=stops[0], bos_token="<s>")
        return cls(tokenizer, stops, correct_template(tokenizer, "auto") is not None)

    def rendered(self, case: str, **kwargs: object) -> Rendered | str:
        """Render a case with its spans, or return what is wrong."""
        record = {"messages": CASES[case], "chat_template_kwargs": kwargs}
        if case in ("tool", "calls"):
            record["tools"] = [TOOL]
        return renderer_for(self.tokenizer, stop_texts=self.stops)([parse_record(record, "f:1")])[0]
