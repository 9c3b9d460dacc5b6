# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Environments of other libraries: checked before anything starts."""

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING

from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.config.schema_grpo import EnvironmentConfig
from nemo_rl_moe.data.prompts import Prompt
from nemo_rl_moe.data.template_inputs import run_wide_inputs
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.launch.tools import continuation_of
from nemo_rl_moe.rewards.interface import Score, ScoringItem
from nemo_rl_moe.rewards.verifiers_library import load_verifiers
from nemo_rl_moe.rollouts.environment import Environment, RolloutFunction
from nemo_rl_moe.rollouts.libraries.openenv_environment import OpenEnvRollout
from nemo_rl_moe.rollouts.libraries.openenv_servers import OpenEnvServer
from nemo_rl_moe.rollouts.libraries.verifiers_environment import VerifiersRollout
from nemo_rl_moe.runs.loggers.console import ConsoleLogger
from nemo_rl_moe.tools.detection import format_of, require_continuable
from nemo_rl_moe.tools.formats.interface import ToolFormat

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


def library_environment(
    config: GRPOMasterConfig,
    tokenizer: "PreTrainedTokenizerBase",
    stop_token_ids: Sequence[int],
    prompts: Sequence[Prompt],
) -> Environment:
    """Return the environment of the library that a configuration names.

    Args:
        prompts: Those to train on; their tools are the environment's.

    Raises:
        ConfigurationError: There is no such environment, or the chat template cannot show calls of its tools.
    """
    env = config.env
    tool_format = None
    if any(prompt.inputs.tools for prompt in prompts):
        tool_format = _tool_format(config, tokenizer, stop_token_ids)
    rollout = VerifiersRollout(load_verifiers(env.parameters), tool_format, score_truncated=env.score_truncated)
    return RolloutFunction(rollout, str(env.driven_by))


def _tool_format(
    config: GRPOMasterConfig, tokenizer: "PreTrainedTokenizerBase", stop_token_ids: Sequence[int]
) -> ToolFormat:
    tool_format = format_of(tokenizer, config.env.tool_format, run_wide_inputs([], config.data.chat_template_kwargs))
    encode = partial(tokenizer.encode, add_special_tokens=False)
    require_continuable(continuation_of(config, tokenizer), tool_format, encode, stop_token_ids)
    return tool_format
