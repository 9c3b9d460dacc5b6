# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The driver that is an environment of the verifiers library: checked before anything starts."""

from collections.abc import Callable

from nemo_rl_moe.config.environments.verifiers import VerifiersConfig
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.launch.drivers.setup import DriverSetup, StartDriver
from nemo_rl_moe.launch.setup import ModelRun
from nemo_rl_moe.rewards.verifiers_library import load_verifiers
from nemo_rl_moe.rollouts.environment import Environment
from nemo_rl_moe.rollouts.libraries.verifiers_environment import VerifiersRollout
from nemo_rl_moe.rollouts.rollout_function import RolloutFunction


def prepare_verifiers(driver: VerifiersConfig, setup: DriverSetup) -> StartDriver:
    """Load an environment of the library.

    Raises:
        ConfigurationError: There is no such environment, or the chat template cannot show calls of its tools.
    """
    environment = load_verifiers(driver)
    tool_format = None
    try:
        tool_format = setup.tool_format(None)
    except ConfigurationError:  # rows of its data may have tools too, which the template then does not show
        if environment.tool_defs:
            raise
    rollout = VerifiersRollout(environment, tool_format, score_truncated=setup.env.score_truncated)

    def start(run: ModelRun, warn: Callable[[str], None]) -> Environment:
        return RolloutFunction(rollout, str(driver.named))

    return start
