# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Tools of a run: checked before anything starts, shown to the model in its prompts, and run in their workers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.config.schema_environment import EnvironmentConfig
from nemo_rl_moe.config.schema_grpo import PromptDataConfig
from nemo_rl_moe.config.schema_mixture import THE_ONLY_ONE
from nemo_rl_moe.data.continuation import Continuation
from nemo_rl_moe.data.template_inputs import run_wide_inputs
from nemo_rl_moe.rollouts.environment import Environment
from nemo_rl_moe.rollouts.tool_environment import ToolConversation
from nemo_rl_moe.runs.loggers.console import ConsoleLogger
from nemo_rl_moe.tools.definitions import Tools, load_tools, with_servers
from nemo_rl_moe.tools.detection import format_of, require_continuable, require_definitions
from nemo_rl_moe.tools.formats.interface import ToolFormat
from nemo_rl_moe.tools.mcp_tools import McpTool, describe_servers
from nemo_rl_moe.tools.worker_pool import ToolWorkers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class PreparedTools:
    """Tools that the model may call, and the format in which it does."""

    tools: Tools
    tool_format: ToolFormat

    def environment(self, config: EnvironmentConfig, workers: ToolWorkers, warn: Callable[[str], None]) -> Environment:
        """Return the environment in which the model calls them."""
        return ToolConversation(
            self.tools,
            self.tool_format,
            workers.call,
            config.tool_limits,
            config.max_turns,
            warn,
            call_cost=config.tool_call_cost,
        )


def prepare_tools(
    config: GRPOMasterConfig,
    tokenizer: "PreTrainedTokenizerBase",
    stop_token_ids: Sequence[int],
    name: str = THE_ONLY_ONE,
) -> PreparedTools | None:
    """Check the tools of an environment; None: it has none.

    Args:
        stop_token_ids: Tokens that end a response.
        name: Name of the environment.

    Raises:
        ConfigurationError: A tool cannot be used, or the chat template cannot show calls and results.
    """
    env = config.env.environments[name]
    if not env.has_tools:
        return None
    tools = _tools(env)
    return PreparedTools(tools, checked_format(config, tokenizer, stop_token_ids, name))


def checked_format(
    config: GRPOMasterConfig, tokenizer: "PreTrainedTokenizerBase", stop_token_ids: Sequence[int], name: str
) -> ToolFormat:
    """Return the format of an environment's calls, whose definitions and results the chat template shows.

    Raises:
        ConfigurationError: It cannot show calls, definitions or results.
    """
    run_wide = run_wide_inputs([], config.data.chat_template_kwargs)
    tool_format = format_of(tokenizer, config.env.environments[name].tool_format, run_wide)
    require_definitions(tokenizer, run_wide)
    encode = partial(tokenizer.encode, add_special_tokens=False)
    require_continuable(continuation_of(config, tokenizer, name), tool_format, encode, stop_token_ids)
    return tool_format


def data_with_tools(config: GRPOMasterConfig, name: str = THE_ONLY_ONE) -> PromptDataConfig:
    """Return the `data` section of an environment, with the definitions of the tools that it has."""
    env, data = config.env.environments[name], config.data.of(name)
    if not env.has_tools:
        return data
    tools = _tools(env)
    return data.model_copy(update={"tools": [dict(tool.definition) for tool in tools.values()]})


def continuation_of(
    config: GRPOMasterConfig, tokenizer: "PreTrainedTokenizerBase", name: str = THE_ONLY_ONE
) -> Continuation:
    """Return what renders messages that are appended to a conversation with an environment."""
    data = data_with_tools(config, name)
    inputs = run_wide_inputs(data.tools, data.chat_template_kwargs)
    keeps = config.env.environments[name].rewritten_turns == "keep"
    most = config.policy.max_total_sequence_length
    return Continuation(tokenizer, inputs, keep_rewritten=keeps, most_tokens=most)


def _tools(env: EnvironmentConfig) -> Tools:
    """Return the tools of a run as the driver sees them: those of servers cannot be called here."""

    def elsewhere(**arguments: object) -> object:
        raise NotImplementedError("tools of servers are called in the tool workers")

    found: list[McpTool] = describe_servers(env.mcp_servers) if env.mcp_servers else []
    return with_servers(load_tools(env.tools, env.tool_parameters), [(tool, elsewhere) for tool in found])


@contextmanager
def running_tool_workers(config: EnvironmentConfig, console: ConsoleLogger) -> Iterator[ToolWorkers]:
    """Start the tool workers, and stop them whatever happens."""
    limits = config.tool_limits
    with console.phase(f"starting the tool workers ({', '.join([*config.tools, *config.mcp_servers])})"):
        workers = ToolWorkers(
            config.tools,
            config.tool_parameters,
            num_workers=limits.num_workers,
            memory_mb=limits.memory_mb,
            most_characters=limits.max_result_characters,
            servers=config.mcp_servers,
        )
    with workers:
        yield workers
