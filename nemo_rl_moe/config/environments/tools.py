# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The driver of conversations with tools of the run."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from nemo_rl_moe.config.environments.base import DriverConfig
from nemo_rl_moe.config.schema_base import PathText, PositiveInt, Processes, Seconds, StrictModel, Text
from nemo_rl_moe.config.schema_grpo import PromptDataConfig


class ToolLimitsConfig(StrictModel):
    """Limits of calls of tools."""

    num_workers: Processes
    """Processes that run tools, each one call at a time."""
    call_timeout_s: Seconds
    """Time limit of a call, in seconds. The model reads an error in place of the result if it is exceeded."""
    turn_timeout_s: Seconds
    """Time limit of all calls of one turn, in seconds. Later calls of the turn are not made. The limit of a trajectory
    is `env.rollout_timeout_s`."""
    max_result_characters: PositiveInt
    """Longest result. A longer one is cut and ends with a note for the model."""
    memory_mb: PositiveInt
    """Megabytes that the tools of a process may take."""


class McpServerConfig(StrictModel):
    """A server of the Model Context Protocol, which speaks through its standard input and output."""

    command: PathText
    """The program: on the path, or its file."""
    args: list[str] = Field(default_factory=list)
    """Its arguments."""
    env: dict[str, str] = Field(default_factory=dict)
    """Variables of its environment in addition to PATH, HOME and the like. It gets no others of the run's."""


class ToolsConfig(DriverConfig):
    """A conversation in which the model calls tools, until it answers without a call."""

    kind: Literal["tools"]
    """This kind."""
    tools: list[Text]
    """Tools that the model may call: `package.module:function`, typed and with a docstring, or calculator, python,
    search. []: only the tools of `mcp_servers`."""
    mcp_servers: dict[Text, McpServerConfig]
    """MCP servers by names of your choice, whose tools the model may also call. Each process that runs tools starts its
    own servers. {}: none."""
    parameters: dict[str, dict[str, Any]]
    """Values of keyword-only parameters by the name of the tool. The model does not see them. {}: none."""
    format: Text | None
    """Format in which the model writes calls: hermes, qwen3_coder, glm45, kimi_k2, minimax_m2, deepseek_v3,
    deepseek_v31, deepseek_v32, mistral, mistral_args, llama3_json, function_calls, olmo3, harmony, `vllm:NAME` for a
    parser of an installed vLLM, or `package.module:FORMAT`. null: the format of the chat template."""
    limits: ToolLimitsConfig
    """Limits of calls."""
    max_turns: PositiveInt
    """Most responses of a trajectory. Calls in the last one are not made."""
    call_cost: Annotated[float, Field(ge=0, le=1_000)]
    """Cost of each call, subtracted from the reward of its trajectory, so that the model learns when not to call.
    `accuracy` does not change. Must be 0 with `env.reward_weights`."""

    has_own_tools: ClassVar[bool] = True

    @property
    def tool_names(self) -> list[str]:
        """Return the tools and servers as the configuration names them."""
        return [*self.tools, *self.mcp_servers]

    def problems(self, key: str, data_key: str, data: PromptDataConfig) -> Iterator[str]:
        """Yield a line where there is no tool, or definitions of others."""
        if not self.tool_names:
            yield f"{key}.tools: got [], expected a tool, or a server in {key}.mcp_servers"
        yield from super().problems(key, data_key, data)
