# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""All kinds of drivers, by the types of their configurations."""

from typing import assert_never

from nemo_rl_moe.config.environments.agent import AgentConfig
from nemo_rl_moe.config.environments.function import FunctionConfig
from nemo_rl_moe.config.environments.kinds import Driver
from nemo_rl_moe.config.environments.openenv import OpenEnvConfig
from nemo_rl_moe.config.environments.single_turn import SingleTurnConfig
from nemo_rl_moe.config.environments.tools import ToolsConfig
from nemo_rl_moe.config.environments.verifiers import VerifiersConfig
from nemo_rl_moe.launch.drivers.agent import check_agent, prepare_agent
from nemo_rl_moe.launch.drivers.openenv import check_openenv, prepare_openenv
from nemo_rl_moe.launch.drivers.setup import DriverSetup, StartDriver
from nemo_rl_moe.launch.drivers.tools import prepare_tools
from nemo_rl_moe.launch.drivers.verifiers import prepare_verifiers
from nemo_rl_moe.rewards.verifiers_library import load_verifiers
from nemo_rl_moe.rollouts.environment import SingleTurn
from nemo_rl_moe.rollouts.rollout_function import load_rollout_function
from nemo_rl_moe.tools.definitions import load_tools


def check_driver(driver: Driver) -> None:
    """Check that the code, the program or the library of a driver exists. Reads no model.

    Raises:
        ConfigurationError: It is not.
    """
    match driver:
        case SingleTurnConfig():
            pass
        case FunctionConfig():
            load_rollout_function(driver.function)
        case ToolsConfig():
            load_tools(driver.tools, driver.parameters)
        case AgentConfig():
            check_agent(driver)
        case VerifiersConfig():
            load_verifiers(driver)
        case OpenEnvConfig():
            check_openenv(driver)
        case _:
            assert_never(driver)


def prepare_driver(driver: Driver, setup: DriverSetup) -> StartDriver:
    """Check a driver with the tokenizer of the run, and return the function that starts it.

    Raises:
        ConfigurationError: It cannot be used, or the chat template cannot show calls and results.
    """
    match driver:
        case SingleTurnConfig():
            return lambda run, warn: SingleTurn()
        case FunctionConfig():
            function = load_rollout_function(driver.function)
            return lambda run, warn: function
        case ToolsConfig():
            return prepare_tools(driver, setup)
        case AgentConfig():
            return prepare_agent(driver, setup)
        case VerifiersConfig():
            return prepare_verifiers(driver, setup)
        case OpenEnvConfig():
            return prepare_openenv(driver, setup)
        case _:
            assert_never(driver)
