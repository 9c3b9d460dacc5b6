# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Inputs of a chat template beside the messages: `tools` and `chat_template_kwargs`, of a record and of a whole run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nemo_rl_moe.config.tool_definitions import definition_problem, reserved_name_problem
from nemo_rl_moe.data.record_values import RecordError, decoded_json, is_list, json_object, kind_of, without_nulls

TOOLS, TEMPLATE_KWARGS = "tools", "chat_template_kwargs"
TEMPLATE_COLUMNS = (TOOLS, TEMPLATE_KWARGS)

ToolDefinition = Mapping[str, Any]


@dataclass(frozen=True)
class TemplateInputs:
    """Tools and further names for a chat template.

    Attributes:
        tools: Definitions in the standard form; None: unspecified.
        kwargs: Such as `enable_thinking`.
    """

    tools: tuple[ToolDefinition, ...] | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def or_else(self, run_wide: "TemplateInputs") -> "TemplateInputs":
        """Merge with the run's inputs: a record's tools replace the run's, its names win one by one."""
        tools = run_wide.tools if self.tools is None else self.tools
        return TemplateInputs(tools, {**run_wide.kwargs, **self.kwargs})


NO_INPUTS = TemplateInputs()


def run_wide_inputs(tools: Sequence[ToolDefinition], kwargs: Mapping[str, Any]) -> TemplateInputs:
    """Return the checked inputs of `data.tools` and `data.chat_template_kwargs`."""
    return TemplateInputs(tuple(tools) or None, dict(kwargs))


def parse_template_inputs(record: Mapping[str, Any]) -> TemplateInputs:
    """Parse `tools` and `chat_template_kwargs` of a record, each an object or JSON in a string.

    Raises:
        RecordError: One of them cannot be used.
    """
    tools, kwargs = record.get(TOOLS), record.get(TEMPLATE_KWARGS)
    if tools is None and kwargs is None:
        return NO_INPUTS
    return TemplateInputs(None if tools is None else _tools(tools), {} if kwargs is None else _kwargs(kwargs))


def _tools(value: object) -> tuple[ToolDefinition, ...]:
    definitions = decoded_json(value, TOOLS)
    if not is_list(definitions):
        raise RecordError(f"{TOOLS} is {kind_of(definitions)}, expected a list of definitions of tools")
    definitions = without_nulls(definitions) if not isinstance(value, str) else definitions
    for index, definition in enumerate(definitions):
        if (problem := definition_problem(definition)) is not None:
            raise RecordError(f"{TOOLS}[{index}]: {problem}")
    return tuple(definitions)


def _kwargs(value: object) -> dict[str, Any]:
    kwargs = json_object(without_nulls(value), TEMPLATE_KWARGS)
    if (problem := reserved_name_problem(kwargs)) is not None:
        raise RecordError(f"{TEMPLATE_KWARGS}: {problem}")
    return kwargs
