# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Tools of servers of the Model Context Protocol."""

import importlib.util
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pydantic import TypeAdapter

from nemo_rl_moe.config.environments.tools import McpServerConfig
from nemo_rl_moe.config.tool_definitions import definition_problem
from nemo_rl_moe.data.record_values import kind_of
from nemo_rl_moe.errors import ConfigurationError, one_line
from nemo_rl_moe.tools.arguments import Parameter, kind_in_words
from nemo_rl_moe.tools.mcp_server import McpServer

SERVERS_KEY = "env.driver.mcp_servers"
START_S = 60.0
"""Maximum number of seconds until a server has started, and until it has listed its tools."""
STOP_S = 15.0
Servers = Mapping[str, McpServerConfig]
_TYPES: dict[str, Any] = {
    "string": str,
    "integer": int,
    "number": float,
    "boolean": bool,
    "array": list[Any],
    "object": dict[str, Any],
}


@dataclass(frozen=True)
class McpTool:
    """A tool of a server.

    Attributes:
        definition: Definition in the standard form, for the chat template.
        parameters: Parameters of the tool. Only their outer types are checked here. The server checks members of lists
            and objects.
    """

    server: str
    name: str
    definition: Mapping[str, Any]
    parameters: tuple[Parameter, ...]


def describe_servers(servers: Servers) -> list[McpTool]:
    """Return the tools of servers. For this, servers are started and stopped again. Results are cached."""
    return list(_described(json.dumps({name: server.model_dump() for name, server in servers.items()})))


@lru_cache(maxsize=4)
def _described(text: str) -> tuple[McpTool, ...]:
    found: list[McpTool] = []
    for name, values in json.loads(text).items():
        server = McpServer(_checked(name, McpServerConfig.model_validate(values)))
        try:
            found += tools_of(name, server)
        finally:
            server.stop(STOP_S)
    return tuple(found)


def tools_of(name: str, server: McpServer) -> list[McpTool]:
    """Return the tools of the server `name`. Raises `ConfigurationError` if it does not start or has no tools."""
    key = f"{SERVERS_KEY}.{name}"
    try:
        tools = server.tools(START_S)
    except TimeoutError as error:
        raise ConfigurationError(f"{key}: the server gave no answer within {START_S:g} s{_said(server)}") from error
    except Exception as error:  # the library raises many types if the process has ended
        raise ConfigurationError(f"{key}: the server does not start: {_root(error)}{_said(server)}") from error
    if not tools:
        raise ConfigurationError(f"{key}: the server has no tools")
    return [_tool(name, tool) for tool in tools]


def running(servers: Servers) -> dict[str, McpServer]:
    """Begin to start servers, and return them by name. Does not wait."""
    found = {name: McpServer(config) for name, config in servers.items()}
    for server in found.values():
        server.start()
    return found


def function_of(server: McpServer, tool: McpTool) -> Callable[..., str]:
    """Return a function of named arguments that calls a tool."""
    return lambda **arguments: server.call(tool.name, arguments)


def _checked(name: str, config: McpServerConfig) -> McpServerConfig:
    key = f"{SERVERS_KEY}.{name}"
    if importlib.util.find_spec("mcp") is None:
        raise ConfigurationError(f"{key}: mcp cannot be imported; pip install 'nemo-rl-moe[mcp]'")
    if shutil.which(config.command) is None:
        raise ConfigurationError(f"{key}.command: got {config.command!r}, expected a program on the path or its file")
    return config


def _tool(server: str, tool: Any) -> McpTool:
    schema = getattr(tool, "input_schema", None) or getattr(tool, "inputSchema", None) or {"type": "object"}
    properties = schema.get("properties") or {}
    if not isinstance(properties, Mapping):
        raise ConfigurationError(
            f"{SERVERS_KEY}.{server}: the tool {tool.name!r} has properties that are {kind_of(properties)}, expected an"
            " object"
        )
    definition = {
        "type": "function",
        "function": {
            "name": tool.name,
            "description": tool.description or tool.name,
            "parameters": {**schema, "properties": properties},
        },
    }
    if (problem := definition_problem(definition)) is not None:
        raise ConfigurationError(
            f"{SERVERS_KEY}.{server}: the tool {tool.name!r} cannot be shown to a model: {problem}"
        )
    required = schema["required"] if isinstance(schema.get("required"), list) else ()
    return McpTool(
        server,
        tool.name,
        definition,
        tuple(
            Parameter(
                name,
                kind_in_words(each),
                TypeAdapter(_type_of(each)),
                None if name in required else json.dumps(each.get("default") if isinstance(each, Mapping) else None),
            )
            for name, each in properties.items()
        ),
    )


def _type_of(schema: object) -> Any:
    if not isinstance(schema, Mapping):
        return Any
    kind = schema.get("type")
    return _TYPES.get(kind, Any) if isinstance(kind, str) and "enum" not in schema else Any


def _root(error: BaseException) -> str:
    """Return an error as one line. Of a group of errors, return the first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return one_line(error)


def _said(server: McpServer) -> str:
    words = server.last_words()
    return f"; its last line of output: {words}" if words else ""
