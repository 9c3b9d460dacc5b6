# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Tools of a run: typed Python functions with their definitions for chat templates."""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from nemo_rl_moe.config.suggestions import did_you_mean, nearest
from nemo_rl_moe.config.user_code import described, import_attribute, is_custom, with_colon
from nemo_rl_moe.errors import ConfigurationError, one_line
from nemo_rl_moe.tools.arguments import Parameter, kind_in_words
from nemo_rl_moe.tools.mcp_tools import SERVERS_KEY, McpTool
from nemo_rl_moe.tools.ready import READY_TOOLS

TOOLS_KEY, PARAMETERS_KEY = "env.driver.tools", "env.driver.parameters"
_TYPES = "str, int, float, bool, Literal, list, dict and X | None"
_PLAIN_TYPES = (str, int, float, bool, list, dict, tuple, NoneType, Any)


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    Attributes:
        name: Name of the function, which the model calls.
        function: The function. It is called with named arguments, which come from the model and from `settings`.
        definition: Definition in the standard form, for the chat template.
        parameters: Parameters that the model sees, in order.
        settings: Name of a keyword-only parameter, which the model does not see -> the run's value.
    """

    name: str
    function: Callable[..., object]
    definition: Mapping[str, Any]
    parameters: Sequence[Parameter]
    settings: Mapping[str, object]

    @property
    def usage(self) -> str:
        """Signature of the tool, such as `search(query: string, num_results: integer = 3)`."""
        return f"{self.name}({', '.join(parameter.usage for parameter in self.parameters)})"


Tools = Mapping[str, Tool]
"""Name -> tool of a run. A name that the model writes is only looked up here."""


def load_tools(references: Sequence[str], settings: Mapping[str, Mapping[str, object]]) -> Tools:
    """Import and return tools. A reference is the name of a built-in tool or `package.module:function`. `settings`:
    name of a tool -> values of its keyword-only parameters."""
    tools: dict[str, Tool] = {}
    for reference in references:
        function = _imported(reference, settings)
        name = _name(reference, function)
        if name in tools:
            raise ConfigurationError(
                f"{TOOLS_KEY}: got {reference!r}, but another tool has the name {name}; expected different names"
            )
        tools[name] = _tool(reference, name, function, settings.get(name, {}))
    for name in settings:
        if name not in tools:
            hint = did_you_mean(nearest(name, tools))
            raise ConfigurationError(f"{PARAMETERS_KEY}: got {name!r}, expected a tool of {TOOLS_KEY}{hint}")
    return tools


def with_servers(tools: Tools, found: Sequence[tuple[McpTool, Callable[..., object]]]) -> Tools:
    """Return the tools with the tools of servers added. `found` has each tool with the function that calls it."""
    all_tools = dict(tools)
    for tool, function in found:
        if tool.name in all_tools:
            raise ConfigurationError(
                f"{SERVERS_KEY}.{tool.server}: another tool has the name {tool.name!r}; expected different names"
            )
        all_tools[tool.name] = Tool(tool.name, function, tool.definition, tool.parameters, {})
    return all_tools


def _imported(reference: str, settings: Mapping[str, Mapping[str, object]]) -> Callable[..., object]:
    if is_custom(reference):
        found = import_attribute(TOOLS_KEY, reference)
        if not inspect.isfunction(found) or inspect.iscoroutinefunction(found) or inspect.isgeneratorfunction(found):
            raise ConfigurationError(
                f"{TOOLS_KEY}: {reference} is {described(found)}, expected a function (def) that returns its result"
            )
        function: Callable[..., object] = found
        return function
    if reference not in READY_TOOLS:
        hint = did_you_mean(with_colon(reference) or nearest(reference, READY_TOOLS))
        expected = f"package.module:function, or one of {', '.join(READY_TOOLS)}"
        raise ConfigurationError(f"{TOOLS_KEY}: got {reference!r}, expected {expected}{hint}")
    ready = READY_TOOLS[reference]
    if problem := ready.problem(settings.get(reference, {})):
        raise ConfigurationError(f"{TOOLS_KEY}: got {reference!r}, which cannot run on this machine: {problem}")
    return ready.function


def _tool(reference: str, name: str, function: Callable[..., object], settings: Mapping[str, object]) -> Tool:
    signature, hints = inspect.signature(function), _hints(reference, function)
    shown: list[inspect.Parameter] = []
    hidden: dict[str, inspect.Parameter] = {}
    for parameter in signature.parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigurationError(
                f"{TOOLS_KEY}: {reference}{signature}: {parameter} cannot be passed by name; expected no *args,"
                " **kwargs or positional-only parameters"
            )
        if parameter.kind == parameter.KEYWORD_ONLY:
            hidden[parameter.name] = parameter
        else:
            shown.append(parameter)
    _require_types_of_json(reference, shown, hints)
    definition = _definition(reference, function, shown, hints)
    properties = definition["function"]["parameters"]["properties"]
    return Tool(
        name,
        function,
        definition,
        [
            Parameter(
                parameter.name,
                kind_in_words(properties[parameter.name]),
                TypeAdapter(hints[parameter.name]),
                None if parameter.default is parameter.empty else json.dumps(parameter.default, default=str),
            )
            for parameter in shown
        ],
        _checked_settings(name, hidden, get_type_hints(function, include_extras=True), settings),
    )


def _require_types_of_json(reference: str, shown: Sequence[inspect.Parameter], hints: Mapping[str, Any]) -> None:
    for parameter in shown:
        if (foreign := _foreign_type(hints.get(parameter.name, Any))) is not None:
            raise ConfigurationError(
                f"{TOOLS_KEY}: {reference}: {parameter.name} is of type {inspect.formatannotation(foreign)}, which JSON"
                f" does not have; expected types among {_TYPES}"
            )


def _foreign_type(hint: Any) -> Any:
    """Return a type in an annotation that JSON does not have, or None if JSON has all types in it."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is None:
        return None if hint in _PLAIN_TYPES else hint
    if origin not in (list, dict, tuple, Literal, Union, UnionType):
        return hint
    found = (None if origin is Literal or part is ... else _foreign_type(part) for part in parts)
    return next((each for each in found if each is not None), None)


def _name(reference: str, function: Callable[..., object]) -> str:
    name = function.__name__
    if not name.isidentifier():
        raise ConfigurationError(f"{TOOLS_KEY}: {reference} is named {name}, expected a function (def) with a name")
    return name


def _hints(reference: str, function: Callable[..., object]) -> dict[str, Any]:
    try:
        return get_type_hints(function)
    except Exception as error:  # an annotation may raise any error
        raise ConfigurationError(f"{TOOLS_KEY}: {reference}: its types cannot be read: {one_line(error)}") from error


def _definition(
    reference: str, function: Callable[..., object], shown: Sequence[inspect.Parameter], hints: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the definition of a function for the chat template, with the parameters that the model sees."""
    from transformers.utils import chat_template_utils as transformers_tools

    def view() -> None: ...

    view.__name__, view.__doc__ = function.__name__, function.__doc__
    view.__annotations__ = {each.name: hints[each.name] for each in shown if each.name in hints}
    view.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    try:
        definition: dict[str, Any] = transformers_tools.get_json_schema(view)
    except (transformers_tools.DocstringParsingException, transformers_tools.TypeHintParsingException) as error:
        raise ConfigurationError(
            f"{TOOLS_KEY}: {reference}: {one_line(error).partition(': ')[2]}; expected a docstring with Args: that"
            f" describes each parameter, and types among {_TYPES}"
        ) from error
    return definition


def _checked_settings(
    name: str, hidden: Mapping[str, inspect.Parameter], hints: Mapping[str, Any], settings: Mapping[str, object]
) -> dict[str, object]:
    key = f"{PARAMETERS_KEY}.{name}"
    for each in settings:
        if each not in hidden:
            expected = " or ".join(hidden) or "nothing: it has no keyword-only parameter"
            raise ConfigurationError(f"{key}: got {each!r}, expected {expected}{did_you_mean(nearest(each, hidden))}")
    checked: dict[str, object] = {}
    for each, parameter in hidden.items():
        if each not in settings:
            if parameter.default is parameter.empty:
                raise ConfigurationError(f"{key}.{each}: is missing, and {name} has no default for it")
            continue
        try:
            checked[each] = TypeAdapter(hints.get(each, Any)).validate_python(settings[each])
        except ValidationError as error:
            problem = error.errors()[0]["msg"]
            raise ConfigurationError(f"{key}.{each}: got {described(settings[each])}: {problem}") from error
    return checked
