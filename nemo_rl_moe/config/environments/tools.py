# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The driver of conversations with the run's tools."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from nemo_rl_moe.config.environments.base import DriverConfig
from nemo_rl_moe.config.schema_base import PathText, PositiveInt, Processes, Seconds, StrictModel, Text
from nemo_rl_moe.config.schema_grpo import PromptDataConfig


class ToolLimitsConfig(StrictModel):
    """Limits of calls of tools."""

    num_workers: Processes
    """Number of processes that run tools. Each runs one call at a time."""
    call_timeout_s: Seconds
    """Time limit of a call, in seconds. If it is exceeded, the model reads an error instead of the result."""
    turn_timeout_s: Seconds
    """Time limit of all calls of one turn, in seconds. Later calls of the turn are not made."""
    max_result_characters: PositiveInt
    """Maximum length of a result, in characters. A longer result is cut and ends with a note for the model."""
    memory_mb: PositiveInt
    """Maximum memory of the tools in a process, in megabytes."""


class McpServerConfig(StrictModel):
    """A server of the Model Context Protocol, which communicates over its standard input and output."""

    command: PathText
    """The program: a name on the path, or a file."""
    args: list[str] = Field(default_factory=list)
    """Arguments of the program."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the server, in addition to PATH, HOME and the like. The server gets no other variables
    of the run."""


class ToolsConfig(DriverConfig):
    """A conversation in which the model calls tools, until it answers without a call."""

    kind: Literal["tools"]
    """Name of this kind of driver."""
    tools: list[Text]
    """Tools that the model may call: calculator, python, search, or `package.module:function` of a function with typed
    parameters and a docstring, or `package.module:Class.method` of a tool with state. []: only the tools of
    `mcp_servers`."""
    mcp_servers: dict[Text, McpServerConfig]
    """Name of your choice -> MCP server whose tools the model may also call. Each tool process starts all servers. {}:
    none."""
    parameters: dict[str, dict[str, Any]]
    """Name of a tool or class -> values of its keyword-only parameters. The model does not see these parameters. {}:
    none."""
    format: Text | None
    """Format in which the model writes calls: hermes, qwen3_coder, glm45, kimi_k2, minimax_m2, deepseek_v3,
    deepseek_v31, deepseek_v32, mistral, mistral_args, llama3_json, function_calls, olmo3, harmony, `vllm:NAME` for a
    parser of an installed vLLM, or `package.module:FORMAT`. null: the format of the chat template."""
    limits: ToolLimitsConfig
    """Limits of calls."""
    max_turns: PositiveInt
    """Maximum number of responses in a trajectory. Calls in the last response are not made."""
    call_cost: Annotated[float, Field(ge=0, le=1_000)]
    """Cost of each call, which is subtracted from the reward of its trajectory, so that the model learns when not to
    call. The metric `accuracy` does not change. Must be 0 with `env.reward_weights`."""

    has_own_tools: ClassVar[bool] = True

    @property
    def tool_names(self) -> list[str]:
        return [*self.tools, *self.mcp_servers]

    def problems(self, key: str, data_key: str, data: PromptDataConfig) -> Iterator[str]:
        if not self.tool_names:
            yield f"{key}.tools: got [], expected a tool, or a server in {key}.mcp_servers"
        yield from super().problems(key, data_key, data)
