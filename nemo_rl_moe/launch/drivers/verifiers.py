# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The driver that is an environment of the verifiers library."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial

from nemo_rl_moe.config.environments.verifiers import VerifiersConfig
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.launch.drivers.setup import DriverSetup, StartDriver, in_separate_process
from nemo_rl_moe.rewards.verifiers_library import load_verifiers
from nemo_rl_moe.rollouts.environment import Environment
from nemo_rl_moe.rollouts.libraries.verifiers_environment import VerifiersRollout
from nemo_rl_moe.rollouts.rollout_function import RolloutFunction
from nemo_rl_moe.tools.formats.interface import ToolFormat


def prepare_verifiers(driver: VerifiersConfig, setup: DriverSetup) -> StartDriver:
    """Load an environment of the library to check it, and return the function that starts its driver."""
    environment = load_verifiers(driver)
    tool_format = None
    try:
        tool_format = setup.tool_format(None)
    except ConfigurationError:  # tools of single rows of its data are then not rendered
        if environment.tool_defs:
            raise
    start = partial(start_verifiers, driver, tool_format, score_truncated=setup.env.score_truncated)
    return in_separate_process(setup, f"env.driver: {driver.named}", start)


def start_verifiers(
    driver: VerifiersConfig, tool_format: ToolFormat | None, *, score_truncated: bool
) -> AbstractContextManager[Environment]:
    """Load the library's environment in the environment's process, and return it."""
    rollout = VerifiersRollout(load_verifiers(driver), tool_format, score_truncated=score_truncated)
    return nullcontext(RolloutFunction(rollout, str(driver.named)))
