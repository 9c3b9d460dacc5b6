# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Environments of a run. They are checked before any worker starts, and then started, each with separate workers."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from nemo_rl_moe.config.environments.rewards import RewardModelAloneConfig, WorkerRewardConfig
from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.config.schema_environment import EnvironmentConfig
from nemo_rl_moe.config.schema_mixture import environment_key
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.generation.interface import SamplingParameters
from nemo_rl_moe.launch.drivers.kinds import kind_of
from nemo_rl_moe.launch.drivers.setup import DriverSetup, StartDriver
from nemo_rl_moe.launch.setup import ModelRun
from nemo_rl_moe.rewards.interface import BatchReward, NoReward
from nemo_rl_moe.rewards.model import LeftToTheModel
from nemo_rl_moe.rewards.registry import make_reward_function
from nemo_rl_moe.rewards.worker_pool import RewardWorkers
from nemo_rl_moe.rollouts.faults import FaultWatch
from nemo_rl_moe.rollouts.process.client import RemoteEnvironment
from nemo_rl_moe.rollouts.run_environment import RunEnvironment
from nemo_rl_moe.runs.loggers.console import ConsoleLogger, Notices

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_environments(config: GRPOMasterConfig) -> None:
    """Check the reward function and the driver of each environment, and raise one `ConfigurationError` with all
    problems. Reads no model."""
    problems: list[str] = []
    for name, env in config.env.environments.items():
        for check in (_check_reward, lambda env: kind_of(env.driver).check()):
            try:
                with problems_of_environment(name):
                    check(env)
            except ConfigurationError as error:
                problems += error.problems
    if problems:
        raise ConfigurationError(problems)


def _check_reward(env: EnvironmentConfig) -> None:
    if isinstance(env.reward, WorkerRewardConfig):
        make_reward_function(env.reward, env)


def prepare_environments(
    config: GRPOMasterConfig, tokenizer: "PreTrainedTokenizerBase", sampling: SamplingParameters
) -> dict[str, StartDriver]:
    """Check the driver of each environment with the tokenizer. Return name -> function that starts the driver."""
    found = {}
    for name, env in config.env.environments.items():
        with problems_of_environment(name):
            found[name] = kind_of(env.driver).prepare(DriverSetup(config, tokenizer, sampling, name))
    return found


def start_environment(setup: DriverSetup, run: ModelRun, start_driver: StartDriver, notices: Notices) -> RunEnvironment:
    """Start the workers of an environment's rewards, tools and agents for the rest of the run, and return the
    environment."""
    env, name = setup.env, setup.name
    driver = start_driver(run, _with_name(name, notices.warn))  # first, because its process starts in the background
    reward: BatchReward = NoReward()
    if isinstance(env.reward, RewardModelAloneConfig):
        reward = LeftToTheModel()
    elif isinstance(env.reward, WorkerRewardConfig):
        reward = run.use(running_reward_workers(env.reward, env, run.console))
    return RunEnvironment(
        driver,
        reward,
        FaultWatch(
            setup.config.grpo.max_consecutive_failed_steps,
            score_truncated=env.score_truncated,
            on_failure=env.on_failure,
            warn=_with_name(name, run.console.warn),
            environment=described(env, name),
        ),
        env.reward_weights,
        setup.continuation(),
        None if isinstance(driver, RemoteEnvironment) else env.rollout_timeout_s,
        num_attempts=2 if env.on_failure == "retry" else 1,
    )


def wait_for_environments(environments: Mapping[str, RunEnvironment], console: ConsoleLogger) -> None:
    """Wait until the processes of environments have started."""
    remote = [each.driver for each in environments.values() if isinstance(each.driver, RemoteEnvironment)]
    if remote:
        with console.phase("waiting for the environment" if len(remote) == 1 else "waiting for the environments"):
            for each in remote:
                each.wait_for_start()


def described(env: EnvironmentConfig, name: str = "") -> str:
    """Return the name of an environment for messages: its user code or, without such code, its name."""
    named = None if env.driver.named is None else f"env.driver: {env.driver.named}"
    own = [text for text in (named, env.reward and env.reward.code) if text]
    return " with ".join(own) or f"the environment {name}".strip()


def _with_name(name: str, say: Callable[[str], None]) -> Callable[[str], None]:
    return (lambda text: say(f"{environment_key(name)}: {text}")) if name else say


@contextmanager
def problems_of_environment(name: str) -> Iterator[None]:
    """In this context, errors about `env` get the keys of the environment `name`, if there are several environments."""
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
def running_reward_workers(
    reward: WorkerRewardConfig, env: EnvironmentConfig, console: ConsoleLogger
) -> Iterator[RewardWorkers]:
    """Run the reward workers of an environment within this context, and yield them."""
    with console.phase(f"starting the reward workers ({reward.kind})"):
        workers = RewardWorkers(reward, env)
    try:
        yield workers
    finally:
        workers.shutdown()
