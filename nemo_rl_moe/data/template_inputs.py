# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Inputs of a chat template in addition to the messages: `tools` and `chat_template_kwargs` of a record and of the
run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nemo_rl_moe.config.suggestions import did_you_mean, nearest, shortened
from nemo_rl_moe.config.tool_definitions import definition_problem, reserved_name_problem
from nemo_rl_moe.data.record_values import RecordError, decoded_json, is_list, json_object, kind_of, without_nulls

TOOLS, TEMPLATE_KWARGS = "tools", "chat_template_kwargs"
FUNCTIONS = "functions"
"""Key of tool definitions in OpenAI's old form. The definitions have no `{"type": "function"}` around them."""
TEMPLATE_COLUMNS = (TOOLS, TEMPLATE_KWARGS, FUNCTIONS)

ToolDefinition = Mapping[str, Any]


@dataclass(frozen=True)
class TemplateInputs:
    """Tools and further variables for a chat template.

    Attributes:
        tools: Definitions in the standard form. None: not given.
        kwargs: Further variables, such as `enable_thinking`.
        tool_names: Names of tools of the run, which a record may give instead of definitions. None: not given.
    """

    tools: tuple[ToolDefinition, ...] | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    tool_names: tuple[str, ...] | None = None

    @property
    def has_tools(self) -> bool:
        return bool(self.tools or self.tool_names)

    def or_else(self, run_wide: "TemplateInputs") -> "TemplateInputs":
        """Return a record's inputs merged with the run's inputs. The record's tools replace the run's tools, and its
        kwargs override the run's kwargs by name."""
        tools = run_wide.tools if self.tools is None else self.tools
        if self.tool_names is not None:
            tools = _chosen(self.tool_names, run_wide.tools or ())
        return TemplateInputs(tools, {**run_wide.kwargs, **self.kwargs})


NO_INPUTS = TemplateInputs()


def run_wide_inputs(tools: Sequence[ToolDefinition], kwargs: Mapping[str, Any]) -> TemplateInputs:
    """Return the run's inputs from `data.tools` and `data.chat_template_kwargs`, which have been checked."""
    return TemplateInputs(tuple(tools) or None, dict(kwargs))


def parse_template_inputs(record: Mapping[str, Any]) -> TemplateInputs:
    """Parse `tools` (definitions, or names of the run's tools) and `chat_template_kwargs` of a record.

    Each may be given as JSON in a string.
    """
    tools, kwargs = record.get(TOOLS), record.get(TEMPLATE_KWARGS)
    tools = None if tools == "" else tools  # "" is an empty cell of a table
    if tools is None and FUNCTIONS in record:
        tools = _tools_of_functions(record[FUNCTIONS])
    if tools is None and kwargs is None:
        return NO_INPUTS
    own = NO_INPUTS if tools is None else _tools(tools)
    return own if kwargs is None else replace(own, kwargs=_kwargs(kwargs))


def _chosen(names: Sequence[str], tools: Sequence[ToolDefinition]) -> tuple[ToolDefinition, ...]:
    by_name: dict[str, ToolDefinition] = {tool["function"]["name"]: tool for tool in tools}
    for name in names:
        if name not in by_name:
            expected = f"one of {', '.join(by_name)}" if by_name else "definitions, as the run has no tools"
            raise RecordError(
                f"{TOOLS} names {shortened(name)!r}, expected {expected}{did_you_mean(nearest(name, by_name))}"
            )
    return tuple(tool for name, tool in by_name.items() if name in names)


def _tools_of_functions(value: object) -> list[ToolDefinition] | None:
    """Return the tools that OpenAI's old `functions` define, or None if the key has another meaning in this record."""
    functions = decoded_json(value, FUNCTIONS) if isinstance(value, str) and value.startswith("[{") else value
    if not is_list(functions) or not functions:
        return None
    if not all(isinstance(each, Mapping) and {"name", "parameters"} <= set(each) for each in functions):
        return None
    return [{"type": "function", "function": each} for each in functions]


def _wrapped(definition: object) -> object:
    """Return a definition in the standard form if it is the bare function, as in LLaMA-Factory's `tools`."""
    names = set(definition) if isinstance(definition, Mapping) else set()
    is_bare = {"name", "parameters"} <= names and not {"type", "function"} & names
    return {"type": "function", "function": definition} if is_bare else definition


def _tools(value: object) -> TemplateInputs:
    definitions = decoded_json(value, TOOLS)
    if not is_list(definitions):
        raise RecordError(f"{TOOLS} is {kind_of(definitions)}, expected a list of definitions of tools")
    if definitions and all(isinstance(each, str) for each in definitions):
        return TemplateInputs(tool_names=tuple(definitions))
    definitions = without_nulls(definitions) if not isinstance(value, str) else definitions
    definitions = [_wrapped(definition) for definition in definitions]
    for index, definition in enumerate(definitions):
        if (problem := definition_problem(definition)) is not None:
            raise RecordError(f"{TOOLS}[{index}]: {problem}")
    return TemplateInputs(tuple(definitions))


def _kwargs(value: object) -> dict[str, Any]:
    kwargs = json_object(without_nulls(value), TEMPLATE_KWARGS)
    if (problem := reserved_name_problem(kwargs)) is not None:
        raise RecordError(f"{TEMPLATE_KWARGS}: {problem}")
    return kwargs
