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
    """Seconds that a call may take; then the model is told so in place of the result."""
    turn_timeout_s: Seconds
    """Seconds that the calls of one turn may take together; later ones are not made. The limit of a trajectory is
    `env.rollout_timeout_s`."""
    max_result_characters: PositiveInt
    """Longest result; a longer one is cut, and its end tells the model so."""
    memory_mb: PositiveInt
    """Megabytes that the tools of a process may take."""


class McpServerConfig(StrictModel):
    """A server of the Model Context Protocol, which speaks through its standard input and output."""

    command: PathText
    """The program: on the path, or its file."""
    args: list[str] = Field(default_factory=list)
    """Its arguments."""
    env: dict[str, str] = Field(default_factory=dict)
    """Variables of its environment beside PATH, HOME and the like: it sees no others of the run's."""


class ToolsConfig(DriverConfig):
    """A conversation in which the model calls tools, until it answers without a call."""

    kind: Literal["tools"]
    """This kind."""
    tools: list[Text]
    """Tools that the model may call: `package.module:function`, typed and with a docstring, or calculator, python,
    search; []: those of `mcp_servers` alone."""
    mcp_servers: dict[Text, McpServerConfig]
    """MCP servers by names of your choice, whose tools the model may call too; each process that runs tools starts its
    own; {}: none."""
    parameters: dict[str, dict[str, Any]]
    """Values of keyword-only parameters of tools, by the name of the tool: the model does not see them; {}: none."""
    format: Text | None
    """Format in which the model writes calls: hermes, qwen3_coder, glm45, kimi_k2, minimax_m2, deepseek_v3,
    deepseek_v31, deepseek_v32, mistral, mistral_args, llama3_json, function_calls, olmo3, harmony, `vllm:NAME`, a
    parser of an installed vLLM, or `package.module:FORMAT`; null: the one that the chat template writes."""
    limits: ToolLimitsConfig
    """Limits of calls."""
    max_turns: PositiveInt
    """Most responses of a trajectory; calls in the last one are not made."""
    call_cost: Annotated[float, Field(ge=0, le=1_000)]
    """Cost of each call, taken from the reward of its trajectory, so that the model learns when not to call; 0: none.
    `accuracy` does not change. Not with `env.reward_weights`."""

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
