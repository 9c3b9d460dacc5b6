# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Environments of other libraries: checked before anything starts."""

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.config.schema_environment import EnvironmentConfig
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.launch.tools import checked_format
from nemo_rl_moe.rewards.interface import Score, ScoringItem
from nemo_rl_moe.rewards.verifiers_library import load_verifiers
from nemo_rl_moe.rollouts.environment import Environment
from nemo_rl_moe.rollouts.libraries.openenv_environment import OpenEnvRollout
from nemo_rl_moe.rollouts.libraries.openenv_servers import OpenEnvServer
from nemo_rl_moe.rollouts.libraries.verifiers_environment import VerifiersRollout
from nemo_rl_moe.rollouts.rollout_function import RolloutFunction
from nemo_rl_moe.runs.loggers.console import ConsoleLogger

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class NoRewardFunction:
    """Reward function of a run whose environment scores trajectories itself: nobody asks it."""

    def score(self, items: Sequence[ScoringItem]) -> list[Score]:
        """Refuse to score."""
        raise NotImplementedError("the environment scores its trajectories itself")


def check_library(env: EnvironmentConfig) -> None:
    """Check that the library of an environment is there, and the environment too where that starts nothing.

    Raises:
        ConfigurationError: It is not.
    """
    if env.has_own_prompts:
        load_verifiers(env.parameters)
    elif importlib.util.find_spec("openenv") is None:
        raise ConfigurationError("env.name: openenv cannot be imported; pip install 'nemo-rl-moe[openenv]'")


@contextmanager
def running_openenv(env: EnvironmentConfig, console: ConsoleLogger) -> Iterator[Environment]:
    """Start the servers of an OpenEnv environment, and stop them whatever happens."""
    assert env.openenv is not None  # a rule of the configuration
    app = env.openenv.app
    servers = [] if app is None else [OpenEnvServer(app) for _ in range(env.openenv.num_servers)]
    with ExitStack() as stack:
        if servers:
            with console.phase(f"starting the servers of the environment ({app})"):
                for server in servers:
                    stack.callback(server.stop)
                    server.start()
                for server in servers:
                    server.wait()
        yield RolloutFunction(OpenEnvRollout(servers, env), str(env.driven_by))


def library_driver(
    config: GRPOMasterConfig, tokenizer: "PreTrainedTokenizerBase", stop_token_ids: Sequence[int], name: str
) -> Environment:
    """Return the driver of an environment that is the library's own object.

    Args:
        name: Of the environment in the run.

    Raises:
        ConfigurationError: There is no such environment, or the chat template cannot show calls of its tools.
    """
    env = config.env.environments[name]
    environment = load_verifiers(env.parameters)
    tool_format = None
    try:
        tool_format = checked_format(config, tokenizer, stop_token_ids, name)
    except ConfigurationError:  # rows of its data may have tools too, which the template then does not show
        if environment.tool_defs:
            raise
    return RolloutFunction(
        VerifiersRollout(environment, tool_format, score_truncated=env.score_truncated), str(env.driven_by)
    )
