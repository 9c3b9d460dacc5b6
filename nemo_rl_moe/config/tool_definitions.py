# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks of a chat template's inputs other than messages: definitions of tools, and variables."""

from collections.abc import Mapping
from typing import Any

DEFINITION_FORM = '{"type": "function", "function": {"name": ..., "parameters": ...}}'
SET_BY_THE_RUN = (
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "chat_template",
    "conversations",
    "continue_final_message",
    "return_assistant_tokens_mask",
)
"""Variables of a chat template that the run sets, or that control its rendering."""


def definition_problem(definition: object) -> str | None:
    """Return the problem of a tool's definition, without the definition's key, or None if there is no problem."""
    function: Any = definition.get("function") if isinstance(definition, Mapping) else None
    name: Any = function.get("name") if isinstance(function, Mapping) else None
    if isinstance(name, str) and name:
        return None
    return f"expected the definition of a tool: {DEFINITION_FORM}"


def reserved_name_problem(names: Mapping[str, object]) -> str | None:
    """Return the problem, without the key of `names`, if `names` has variables of the chat template that only the run
    may set. Otherwise return None."""
    taken = [name for name in names if name in SET_BY_THE_RUN]
    return (
        f"the run itself sets {' and '.join(taken)}; expected other names, such as enable_thinking" if taken else None
    )
