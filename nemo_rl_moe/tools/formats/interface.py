# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Calls of tools, and formats in which a model writes them."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nemo_rl_moe.data.thinking import THINK_END

_MARK = re.compile(r"<[^<>]*>|\[[A-Z_]+\]")
Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schemas of the parameters, by the names of tool and parameter: formats without types need them."""


@dataclass(frozen=True)
class ToolCall:
    """A call as the model wrote it; whether there is such a tool is not checked yet."""

    name: str
    arguments: Mapping[str, object]


@dataclass(frozen=True)
class MalformedCall:
    """A call that cannot be read.

    Attributes:
        problem: What is wrong, in words for the model.
    """

    problem: str


ParsedCall = ToolCall | MalformedCall
Parse = Callable[[str, Schemas], list[ParsedCall]]


@dataclass(frozen=True)
class ToolFormat:
    """Format of calls.

    Attributes:
        parse: Returns the calls in the text of a turn, in their order; never raises.
        example: A call in this format, for answers to malformed ones.
    """

    parse: Parse
    example: str

    @property
    def mark(self) -> str:
        """Return the mark that opens calls, with which the example begins."""
        found = _MARK.match(self.example)
        return self.example[0] if found is None else found[0]

    def calls(self, text: str, schemas: Schemas, *, begins_in_thinking: bool = False) -> list[ParsedCall]:
        """Return the calls in a turn of the model; what it thinks are none.

        Args:
            text: Without the token that ended the turn.
            begins_in_thinking: The prompt has opened a think block.
        """
        if begins_in_thinking:
            text = text.partition(THINK_END)[2]
        return self.parse(text, schemas)
