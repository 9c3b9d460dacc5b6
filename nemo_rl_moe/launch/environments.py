# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Environments of a run: checked before anything starts, then started, each with workers of its own."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.config.schema_environment import EnvironmentConfig
from nemo_rl_moe.config.schema_mixture import environment_key
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.generation.interface import SamplingParameters
from nemo_rl_moe.launch.agents import PreparedAgent, prepare_agent, running_agents
from nemo_rl_moe.launch.libraries import NoRewardFunction, check_library, library_driver, running_openenv
from nemo_rl_moe.launch.setup import ModelRun
from nemo_rl_moe.launch.tools import PreparedTools, continuation_of, prepare_tools, running_tool_workers
from nemo_rl_moe.rewards.interface import BatchReward
from nemo_rl_moe.rewards.model import LeftToTheModel
from nemo_rl_moe.rewards.registry import make_reward_function
from nemo_rl_moe.rewards.worker_pool import RewardWorkers
from nemo_rl_moe.rollouts.environment import Environment
from nemo_rl_moe.rollouts.faults import FaultWatch
from nemo_rl_moe.rollouts.mixture import SessionSettings
from nemo_rl_moe.rollouts.rollout_function import make_environment, name_of_environment
from nemo_rl_moe.runs.loggers.console import ConsoleLogger, Notices

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class PreparedEnvironment:
    """An environment that has been checked.

    Attributes:
        driver: Drives trajectories where there are no tools and no agent.
        tools: Tools that the model may call; None: none.
        agent: Program that asks the model; None: none.
    """

    driver: Environment
    tools: PreparedTools | None
    agent: PreparedAgent | None


@dataclass(frozen=True)
class StartedEnvironment:
    """An environment whose workers run.

    Attributes:
        environment: Drives its trajectories.
        reward_function: Scores its responses.
        settings: Settings of its sessions.
        watch: Sees its trajectories.
    """

    environment: Environment
    reward_function: BatchReward
    settings: SessionSettings
    watch: FaultWatch


def check_environments(config: GRPOMasterConfig) -> dict[str, Environment]:
    """Try the reward function of each environment, and return what drives its trajectories, by name.

    Raises:
        ConfigurationError: A library, a task, a parameter, a module or a function is missing or wrong.
    """
    drivers = {}
    for name, env in config.env.environments.items():
        with problems_of_environment(name):
            if env.scores_trajectories:
                check_library(env)
            elif not env.leaves_it_to_the_model:
                make_reward_function(env)
    for name, env in config.env.environments.items():
        with problems_of_environment(name):
            drivers[name] = make_environment(env)
    return drivers


def prepare_environments(
    config: GRPOMasterConfig,
    drivers: Mapping[str, Environment],
    tokenizer: "PreTrainedTokenizerBase",
    sampling: SamplingParameters,
) -> dict[str, PreparedEnvironment]:
    """Check the tools or the agent of each environment.

    Args:
        drivers: As of `check_environments`.
        sampling: How the run samples responses that are trained on.

    Raises:
        ConfigurationError: A tool or an agent cannot be used, or the chat template cannot show calls and results.
    """
    found = {}
    for name, driver in drivers.items():
        with problems_of_environment(name):
            if config.env.environments[name].has_own_prompts:
                driver = library_driver(config, tokenizer, sampling.stop_token_ids, name)
            tools = prepare_tools(config, tokenizer, sampling.stop_token_ids, name)
            found[name] = PreparedEnvironment(driver, tools, prepare_agent(config, tokenizer, sampling, name))
    return found


def start_environment(
    config: GRPOMasterConfig,
    run: ModelRun,
    name: str,
    prepared: PreparedEnvironment,
    tokenizer: "PreTrainedTokenizerBase",
    notices: Notices,
) -> StartedEnvironment:
    """Start the workers of rewards, tools and agents of an environment, for the rest of the run."""
    env, warn = config.env.environments[name], _with_name(name, notices.warn)
    reward_function: BatchReward = NoRewardFunction()
    if env.leaves_it_to_the_model:
        reward_function = LeftToTheModel()
    elif not env.scores_trajectories:
        reward_function = run.use(running_reward_workers(env, run.console))
    environment = prepared.driver
    if env.scores_trajectories and not env.has_own_prompts:
        environment = run.use(running_openenv(env, run.console))
    if prepared.tools is not None:
        workers = run.use(running_tool_workers(env, run.console))
        environment = prepared.tools.environment(env, workers, warn)
    if prepared.agent is not None:
        environment = run.use(running_agents(prepared.agent, config, run.console, name))
    return StartedEnvironment(
        environment,
        reward_function,
        SessionSettings(
            env.reward_weights,
            continuation_of(config, tokenizer, name),
            env.rollout_timeout_s,
            num_attempts=2 if env.on_failure == "retry" else 1,
        ),
        FaultWatch(
            config.grpo.max_consecutive_failed_steps,
            score_truncated=env.score_truncated,
            on_failure=env.on_failure,
            warn=_with_name(name, run.console.warn),
            environment=name_of_environment(env, name),
        ),
    )


def _with_name(name: str, say: Callable[[str], None]) -> Callable[[str], None]:
    return (lambda text: say(f"{environment_key(name)}: {text}")) if name else say


@contextmanager
def problems_of_environment(name: str) -> Iterator[None]:
    """Name the keys of one of several environments in the problems that are found inside."""
    try:
        yield
    except ConfigurationError as error:
        if not name:
            raise
        key = environment_key(name)
        own = [
            f"{key}.{problem.removeprefix('env.')}" if problem.startswith("env.") else f"{key}: {problem}"
            for problem in error.problems
        ]
        raise ConfigurationError(own) from error


@contextmanager
def running_reward_workers(config: EnvironmentConfig, console: ConsoleLogger) -> Iterator[RewardWorkers]:
    """Start the reward workers of an environment, and stop them whatever happens."""
    with console.phase(f"starting the reward workers ({config.name})"):
        reward_function = RewardWorkers(config)
    try:
        yield reward_function
    finally:
        reward_function.shutdown()
