# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Tools of a run: typed Python functions with their definitions for chat templates."""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python

from nemo_rl_moe.config.suggestions import did_you_mean, nearest
from nemo_rl_moe.config.user_code import described, import_attribute, is_custom, with_colon
from nemo_rl_moe.errors import ConfigurationError, one_line
from nemo_rl_moe.tools.arguments import Parameter, kind_in_words
from nemo_rl_moe.tools.function_schemas import definition_of, is_plain
from nemo_rl_moe.tools.mcp_tools import SERVERS_KEY, McpTool
from nemo_rl_moe.tools.ready import READY_TOOLS

TOOLS_KEY, PARAMETERS_KEY = "env.driver.tools", "env.driver.parameters"
_RECORD = "record"


@dataclass(frozen=True)
class ToolState:
    """A class whose methods are tools. Each trajectory that calls one has an object of the class.

    Attributes:
        make: Makes the object of a trajectory from the record of its prompt.
    """

    owner: type
    make: Callable[[Mapping[str, Any]], object]


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    Attributes:
        name: Name of the function, which the model calls.
        function: The function, which may be a coroutine function. It is called with named arguments, which come from
            the model and from `settings`. With a `state`, the object of the trajectory precedes them.
        definition: Definition in the standard form, for the chat template.
        parameters: Parameters that the model sees, in order.
        settings: Name of a keyword-only parameter, which the model does not see -> the run's value.
    """

    name: str
    function: Callable[..., object]
    definition: Mapping[str, Any]
    parameters: Sequence[Parameter]
    settings: Mapping[str, object]
    state: ToolState | None = None

    @property
    def usage(self) -> str:
        """Signature of the tool, such as `search(query: string, num_results: integer = 3)`."""
        return f"{self.name}({', '.join(parameter.usage for parameter in self.parameters)})"


Tools = Mapping[str, Tool]
"""Name -> tool of a run. A name that the model writes is only looked up here."""


def load_tools(references: Sequence[str], settings: Mapping[str, Mapping[str, object]]) -> Tools:
    """Import and return tools.

    Args:
        references: Each is the name of a built-in tool, `package.module:function` or `package.module:Class.method`.
        settings: Name of a tool or class -> values of its keyword-only parameters.
    """
    tools: dict[str, Tool] = {}
    states: dict[str, ToolState] = {}
    for reference in references:
        function = _imported(reference, settings)
        name = _name(reference, function)
        owner = _owner(reference, function)
        state = None
        if owner is not None:
            state = states.get(owner.__name__) or _state(reference, owner, settings.get(owner.__name__, {}))
            states[owner.__name__] = state
            if state.owner is not owner:
                raise ConfigurationError(f"{TOOLS_KEY}: got {reference!r}, but another class has the name; rename one")
        if name in tools:
            raise ConfigurationError(
                f"{TOOLS_KEY}: got {reference!r}, but another tool has the name {name}; expected different names"
            )
        tools[name] = _tool(reference, name, function, settings.get(name, {}), state)
    for name in settings:
        if name not in (*tools, *states):
            hint = did_you_mean(nearest(name, (*tools, *states)))
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
        if not inspect.isfunction(found) or inspect.isgeneratorfunction(found) or inspect.isasyncgenfunction(found):
            raise ConfigurationError(
                f"{TOOLS_KEY}: {reference} is {described(found)}, expected a function (def or async def) that returns"
                " its result, or a method of a class (package.module:Class.method)"
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


def _owner(reference: str, function: Callable[..., object]) -> type | None:
    """Return the class of a method, or None for a function that needs no object."""
    path, _, name = reference.rpartition(".")
    owner = import_attribute(TOOLS_KEY, path) if is_custom(path) else None
    is_method = inspect.isclass(owner) and inspect.getattr_static(owner, name) is function
    return owner if is_method else None


def _state(reference: str, owner: type, settings: Mapping[str, object]) -> ToolState:
    parameters = inspect.signature(owner).parameters.values()
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [each.name for each in parameters if each.kind in named and each.default is each.empty]
    if any(name != _RECORD for name in needed):
        raise ConfigurationError(
            f"{TOOLS_KEY}: {reference}: {owner.__name__} needs {', '.join(needed)}, expected at most {_RECORD} (the"
            " prompt's record) and keyword-only parameters"
        )
    hidden = {each.name: each for each in parameters if each.kind == each.KEYWORD_ONLY}
    checked = _checked_settings(owner.__name__, hidden, _hints(reference, vars(owner).get("__init__", owner)), settings)
    if needed:
        return ToolState(owner, partial(owner, **checked))
    return ToolState(owner, lambda record: owner(**checked))


def _tool(
    reference: str,
    name: str,
    function: Callable[..., object],
    settings: Mapping[str, object],
    state: ToolState | None,
) -> Tool:
    signature, hints = inspect.signature(function), _hints(reference, function)
    shown: list[inspect.Parameter] = []
    hidden: dict[str, inspect.Parameter] = {}
    for parameter in list(signature.parameters.values())[0 if state is None else 1 :]:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigurationError(
                f"{TOOLS_KEY}: {reference}{signature}: {parameter} cannot be passed by name; expected no *args,"
                " **kwargs or positional-only parameters"
            )
        if parameter.kind == parameter.KEYWORD_ONLY:
            hidden[parameter.name] = parameter
        else:
            shown.append(parameter)
    definition = definition_of(f"{TOOLS_KEY}: {reference}", function, shown, hints)
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
                None if parameter.default is parameter.empty else _as_json(parameter.default),
                runs_user_code=not is_plain(hints[parameter.name]),
            )
            for parameter in shown
        ],
        _checked_settings(name, hidden, hints, settings),
        state,
    )


def _as_json(default: object) -> str:
    return json.dumps(to_jsonable_python(default, fallback=str))


def _name(reference: str, function: Callable[..., object]) -> str:
    name = function.__name__
    if not name.isidentifier():
        raise ConfigurationError(f"{TOOLS_KEY}: {reference} is named {name}, expected a function (def) with a name")
    return name


def _hints(reference: str, function: Callable[..., object]) -> dict[str, Any]:
    try:
        return get_type_hints(function, include_extras=True)
    except Exception as error:  # an annotation may raise any error
        raise ConfigurationError(f"{TOOLS_KEY}: {reference}: its types cannot be read: {one_line(error)}") from error


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
