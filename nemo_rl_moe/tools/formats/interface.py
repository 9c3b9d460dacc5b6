# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Tool calls, and the formats in which models write them."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nemo_rl_moe.data.thinking import THINK_END

_MARK = re.compile(r"<[^<>]*>|\[[A-Z_]+\]")
Schemas = Mapping[str, Mapping[str, Any]]
"""Name of a tool -> name of a parameter -> its JSON schema. Formats whose arguments have no types need schemas."""


@dataclass(frozen=True)
class ToolCall:
    """A call as the model wrote it. Its name and arguments have not been checked."""

    name: str
    arguments: Mapping[str, object]


@dataclass(frozen=True)
class MalformedCall:
    """A call that cannot be read. `problem` is written for the model."""

    problem: str


ParsedCall = ToolCall | MalformedCall
Parse = Callable[[str, Schemas], list[ParsedCall]]


@dataclass(frozen=True)
class ToolFormat:
    """A format in which models write calls.

    Attributes:
        parse: Function that returns the calls in the text of a turn, in order. It never raises.
        example: A call of `tool` in this format, for answers to malformed calls.
    """

    parse: Parse
    example: str

    @property
    def mark(self) -> str:
        """The mark with which calls begin. It is the beginning of the example."""
        found = _MARK.match(self.example)
        return self.example[0] if found is None else found[0]

    def calls(self, text: str, schemas: Schemas, *, begins_in_thinking: bool = False) -> list[ParsedCall]:
        """Return the calls in a turn of the model, outside of its thinking.

        Args:
            text: The turn without its end token.
            begins_in_thinking: Whether the prompt has opened a think block.
        """
        if begins_in_thinking:
            text = text.partition(THINK_END)[2]
        return self.parse(text, schemas)
