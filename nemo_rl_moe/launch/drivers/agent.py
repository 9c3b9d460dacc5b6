# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The driver of agents: its checks before any worker starts, its endpoint, and the agents' processes."""

import inspect
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from nemo_rl_moe.config.environments.agent import AgentConfig, EndpointDriverConfig
from nemo_rl_moe.config.user_code import import_function_of_task
from nemo_rl_moe.data.speech import describe_speech
from nemo_rl_moe.endpoint.chat_requests import RequestRules
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.launch.drivers.setup import DriverSetup, StartDriver, in_separate_process
from nemo_rl_moe.rollouts.agents.environment import AgentEnvironment
from nemo_rl_moe.rollouts.agents.requests import GATHER_S, RequestSettings
from nemo_rl_moe.rollouts.agents.server import EndpointServer
from nemo_rl_moe.rollouts.agents.worker import AGENT_KEY, AgentProgram, Program
from nemo_rl_moe.rollouts.agents.worker_pool import AgentWorkers
from nemo_rl_moe.rollouts.environment import Environment
from nemo_rl_moe.tools.detection import format_of

LOG_SUFFIX = ".agents.log"
"""Suffix of the agents' log file. The file lies next to `logger.log_dir` and has its name with this suffix."""


def check_agent(driver: AgentConfig) -> None:
    """Check that an agent's function or program exists. Raises `ConfigurationError` if not."""
    if isinstance(driver.program, str):
        function = import_function_of_task(AGENT_KEY, driver.program)
        if driver.limits.agents_per_worker > 1 and not inspect.iscoroutinefunction(function):
            raise _one_at_a_time(driver, "a function that is no `async def`")
    elif driver.limits.agents_per_worker > 1:
        raise _one_at_a_time(driver, "a command")
    elif not driver.program or shutil.which(driver.program[0]) is None:
        given = repr(driver.program[0]) if driver.program else "in the empty list"
        raise ConfigurationError(f"{AGENT_KEY}: there is no program {given}; expected one in the PATH, or a path to it")


def _one_at_a_time(driver: AgentConfig, kind: str) -> ConfigurationError:
    return ConfigurationError(
        f"env.driver.limits.agents_per_worker: got {driver.limits.agents_per_worker}, expected 1, as {driver.named} is"
        f" {kind}"
    )


def prepare_agent(driver: AgentConfig, setup: DriverSetup) -> StartDriver:
    """Check the agent of an environment, and return the function that starts its driver."""
    check_agent(driver)
    reference = driver.program if isinstance(driver.program, str) else None
    command = () if isinstance(driver.program, str) else tuple(driver.program)
    limits = driver.limits
    return prepare_program(driver, setup, AgentProgram(reference, command, limits.memory_mb, limits.agents_per_worker))


def prepare_program(driver: EndpointDriverConfig, setup: DriverSetup, program: Program) -> StartDriver:
    """Check that a program can use the endpoint with the run's tokenizer, and return the function that starts the
    driver."""
    if not setup.tokenizer.chat_template:
        raise ConfigurationError(
            f"env.driver.kind: {driver.kind} sends messages, for which the tokenizer has no chat template; set"
            " policy.tokenizer.chat_template"
        )
    tool_format, no_tools = None, None
    try:
        tool_format = format_of(setup.tokenizer, driver.format, setup.run_wide)
    except ConfigurationError as error:
        if driver.format is not None:
            raise
        no_tools = str(error).partition(": ")[2]
    model, is_strict = setup.config.policy.model_name, driver.agent_requests == "strict"
    make_rules = partial(RequestRules, model, setup.sampling, no_tools, is_strict=is_strict)
    thinking = describe_speech(setup.tokenizer, kwargs=setup.config.data.chat_template_kwargs).thinking
    gather_s = GATHER_S if setup.config.policy.generation.engine.shares_weights else 0.0

    make_settings = partial(_request_settings, make_rules, tool_format, driver.max_turns, thinking, gather_s)
    log = Path(f"{str(setup.config.logger.log_dir).rstrip('/')}{LOG_SUFFIX}")
    start = partial(running_agents, program, driver.limits.num_workers, make_settings, setup.env.reward_weights, log)
    return in_separate_process(setup, f"env.driver: {driver.named}", start)


def _request_settings(make_rules: Callable[[], RequestRules], *settings: Any) -> RequestSettings:
    return RequestSettings(make_rules(), *settings)


@contextmanager
def running_agents(
    program: Program,
    num_workers: int,
    make_settings: Callable[[], RequestSettings],
    reward_weights: Mapping[str, float] | None,
    log: Path,
) -> Iterator[Environment]:
    """Run the endpoint and the agents' processes within this context, and yield the environment. Called in the
    environment's process.

    Args:
        make_settings: Makes the settings, which cannot be pickled.
        log: File to which the agents' output is written.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    settings = make_settings()
    with EndpointServer(settings.rules.model) as server, AgentWorkers(program, num_workers, log) as workers:
        yield AgentEnvironment(settings, server, workers, reward_weights)
