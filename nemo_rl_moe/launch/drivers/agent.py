# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The driver that is an agent: checked before anything starts, then its endpoint and its processes."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from nemo_rl_moe.config.environments.agent import AgentConfig
from nemo_rl_moe.config.user_code import import_function_of_task
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.launch.drivers.setup import DriverSetup, StartDriver
from nemo_rl_moe.launch.setup import ModelRun
from nemo_rl_moe.rollouts.agents.chat_requests import RequestRules
from nemo_rl_moe.rollouts.agents.environment import AgentEnvironment
from nemo_rl_moe.rollouts.agents.server import EndpointServer
from nemo_rl_moe.rollouts.agents.worker import AGENT_KEY, AgentProgram
from nemo_rl_moe.rollouts.agents.worker_pool import AgentWorkers
from nemo_rl_moe.rollouts.environment import Environment
from nemo_rl_moe.runs.loggers.console import ConsoleLogger
from nemo_rl_moe.tools.detection import format_of
from nemo_rl_moe.tools.formats.interface import ToolFormat

LOG_SUFFIX = ".agents.log"
"""Suffix of the log file, which lies next to the folder of the runs and has its name."""


def check_agent(driver: AgentConfig) -> None:
    """Check that the function or the program of an agent exists.

    Raises:
        ConfigurationError: There is no such function or program.
    """
    if isinstance(driver.program, str):
        import_function_of_task(AGENT_KEY, driver.program)
    elif not driver.program or shutil.which(driver.program[0]) is None:
        given = repr(driver.program[0]) if driver.program else "in the empty list"
        raise ConfigurationError(f"{AGENT_KEY}: there is no program {given}; expected one in the PATH, or a path to it")


def prepare_agent(driver: AgentConfig, setup: DriverSetup) -> StartDriver:
    """Check the agent of an environment.

    Raises:
        ConfigurationError: There is no such function or program, or the model takes no messages.
    """
    check_agent(driver)
    if not setup.tokenizer.chat_template:
        raise ConfigurationError(
            f"{AGENT_KEY}: the tokenizer has no chat template for messages; set policy.tokenizer.chat_template"
        )
    tool_format, no_tools = None, None
    try:
        tool_format = format_of(setup.tokenizer, driver.format, setup.run_wide)
    except ConfigurationError as error:
        if driver.format is not None:
            raise
        no_tools = str(error).partition(": ")[2]
    rules = RequestRules(setup.config.policy.model_name, setup.sampling, no_tools)
    log = Path(f"{str(setup.config.logger.log_dir).rstrip('/')}{LOG_SUFFIX}")

    def start(run: ModelRun, warn: Callable[[str], None]) -> Environment:
        return run.use(running_agents(driver, rules, tool_format, setup.env.reward_weights, log, run.console))

    return start


@contextmanager
def running_agents(
    driver: AgentConfig,
    rules: RequestRules,
    tool_format: ToolFormat | None,
    reward_weights: Mapping[str, float] | None,
    log: Path,
    console: ConsoleLogger,
) -> Iterator[AgentEnvironment]:
    """Start the endpoint and the processes of agents, and stop them whatever happens.

    Args:
        tool_format: Format in which the model writes calls; None: requests have no tools.
        log: File that gets what agents print.
    """
    program = AgentProgram(
        driver.program if isinstance(driver.program, str) else None,
        () if isinstance(driver.program, str) else tuple(driver.program),
        driver.limits.memory_mb,
    )
    log.parent.mkdir(parents=True, exist_ok=True)
    with EndpointServer(rules.model) as server:
        with console.phase(f"starting the agents ({driver.named})"):
            workers = AgentWorkers(program, driver.limits.num_workers, log)
        with workers:
            yield AgentEnvironment(rules, tool_format, driver.max_turns, server, workers, reward_weights)
