# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Agents of a run: checked before anything starts, and their endpoints and processes for the rest of the run."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.config.schema_environment import EnvironmentConfig
from nemo_rl_moe.config.schema_mixture import THE_ONLY_ONE
from nemo_rl_moe.config.user_code import import_function_of_task
from nemo_rl_moe.data.template_inputs import run_wide_inputs
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.generation.interface import SamplingParameters
from nemo_rl_moe.rollouts.agents.chat_requests import RequestRules
from nemo_rl_moe.rollouts.agents.environment import AgentEnvironment
from nemo_rl_moe.rollouts.agents.server import EndpointServer
from nemo_rl_moe.rollouts.agents.worker import AGENT_KEY, AgentProgram
from nemo_rl_moe.rollouts.agents.worker_pool import AgentWorkers
from nemo_rl_moe.runs.loggers.console import ConsoleLogger
from nemo_rl_moe.tools.detection import format_of
from nemo_rl_moe.tools.formats.interface import ToolFormat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COMMAND_KEY = "env.agent_command"
LOG_SUFFIX = ".agents.log"
"""Behind the name of the folder of the runs, beside which the file stands: in it are runs alone."""


@dataclass(frozen=True)
class PreparedAgent:
    """An agent that has been checked, and the limits of its requests.

    Attributes:
        tool_format: Format in which the model writes calls; None: requests have no tools.
    """

    program: AgentProgram
    rules: RequestRules
    tool_format: ToolFormat | None


def check_agent(env: EnvironmentConfig) -> None:
    """Check that the agent of an environment is there, if it has one.

    Raises:
        ConfigurationError: There is no such function or program.
    """
    if env.agent is not None:
        import_function_of_task(AGENT_KEY, env.agent)
    elif env.has_agent and shutil.which(env.agent_command[0]) is None:
        raise ConfigurationError(
            f"{COMMAND_KEY}: there is no program {env.agent_command[0]!r}; expected one in the PATH, or a path to it"
        )


def prepare_agent(
    config: GRPOMasterConfig,
    tokenizer: "PreTrainedTokenizerBase",
    sampling: SamplingParameters,
    name: str = THE_ONLY_ONE,
) -> PreparedAgent | None:
    """Check the agent of an environment; None: it has none.

    Args:
        sampling: How the run samples responses that are trained on.
        name: Name of the environment.

    Raises:
        ConfigurationError: There is no such function or program, or the model takes no messages.
    """
    env = config.env.environments[name]
    if not env.has_agent:
        return None
    check_agent(env)
    key = AGENT_KEY if env.agent is not None else COMMAND_KEY
    if not tokenizer.chat_template:
        raise ConfigurationError(
            f"{key}: the tokenizer has no chat template for messages; set policy.tokenizer.chat_template"
        )
    tool_format, no_tools = None, None
    try:
        tool_format = format_of(tokenizer, env.tool_format, run_wide_inputs([], config.data.chat_template_kwargs))
    except ConfigurationError as error:
        if env.tool_format is not None:
            raise
        no_tools = str(error).partition(": ")[2]
    program = AgentProgram(env.agent, tuple(env.agent_command), env.agent_limits.memory_mb)
    return PreparedAgent(program, RequestRules(config.policy.model_name, sampling, no_tools), tool_format)


@contextmanager
def running_agents(
    prepared: PreparedAgent, config: GRPOMasterConfig, console: ConsoleLogger, name: str = THE_ONLY_ONE
) -> Iterator[AgentEnvironment]:
    """Start the endpoint and the processes of agents, and stop them whatever happens."""
    env, log = config.env.environments[name], Path(f"{str(config.logger.log_dir).rstrip('/')}{LOG_SUFFIX}")
    log.parent.mkdir(parents=True, exist_ok=True)
    with EndpointServer(prepared.rules.model) as server:
        with console.phase(f"starting the agents ({env.driven_by})"):
            workers = AgentWorkers(prepared.program, env.agent_limits.num_workers, log)
        with workers:
            yield AgentEnvironment(
                prepared.rules, prepared.tool_format, env.max_turns, server, workers, env.reward_weights
            )
