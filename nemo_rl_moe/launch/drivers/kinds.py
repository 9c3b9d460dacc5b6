# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""All kinds of drivers, found by the type of their configuration."""

from functools import partial
from typing import assert_never

from nemo_rl_moe.config.environments.agent import AgentConfig
from nemo_rl_moe.config.environments.function import FunctionConfig
from nemo_rl_moe.config.environments.kinds import Driver
from nemo_rl_moe.config.environments.openenv import OpenEnvConfig
from nemo_rl_moe.config.environments.single_turn import SingleTurnConfig
from nemo_rl_moe.config.environments.tools import ToolsConfig
from nemo_rl_moe.config.environments.verifiers import VerifiersConfig
from nemo_rl_moe.config.environments.verifiers_v1 import VerifiersV1Config
from nemo_rl_moe.data.verifiers_prompts import verifiers_prompts
from nemo_rl_moe.launch.drivers.agent import check_agent, prepare_agent
from nemo_rl_moe.launch.drivers.function import prepare_function
from nemo_rl_moe.launch.drivers.openenv import check_openenv, prepare_openenv
from nemo_rl_moe.launch.drivers.setup import DriverKind
from nemo_rl_moe.launch.drivers.tools import prepare_tools
from nemo_rl_moe.launch.drivers.verifiers import prepare_verifiers
from nemo_rl_moe.launch.drivers.verifiers_v1 import verifiers_v1
from nemo_rl_moe.rewards.verifiers_library import load_verifiers
from nemo_rl_moe.rollouts.environment import SingleTurn
from nemo_rl_moe.rollouts.rollout_function import load_rollout_function
from nemo_rl_moe.tools.definitions import load_tools


def kind_of(driver: Driver) -> DriverKind:
    """Return the functions with which a run checks and starts a driver."""
    match driver:
        case SingleTurnConfig():
            return DriverKind(lambda setup: lambda run, warn: SingleTurn())
        case FunctionConfig():
            return DriverKind(partial(prepare_function, driver), partial(load_rollout_function, driver.function))
        case ToolsConfig():
            return DriverKind(partial(prepare_tools, driver), partial(load_tools, driver.tools, driver.parameters))
        case AgentConfig():
            return DriverKind(partial(prepare_agent, driver), partial(check_agent, driver))
        case VerifiersConfig():
            prompts = partial(verifiers_prompts, driver)
            return DriverKind(partial(prepare_verifiers, driver), partial(load_verifiers, driver), prompts)
        case VerifiersV1Config():
            return verifiers_v1(driver)
        case OpenEnvConfig():
            return DriverKind(partial(prepare_openenv, driver), partial(check_openenv, driver))
        case _:
            assert_never(driver)
