# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The driver that is a function of the user. It is checked before any worker starts, and runs in a separate process."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial

from nemo_rl_moe.config.environments.function import FunctionConfig
from nemo_rl_moe.launch.drivers.setup import DriverSetup, StartDriver, in_separate_process
from nemo_rl_moe.rollouts.environment import Environment
from nemo_rl_moe.rollouts.rollout_function import ROLLOUT_KEY, load_rollout_function


def prepare_function(driver: FunctionConfig, setup: DriverSetup) -> StartDriver:
    """Check that the function exists, and return the function that starts the driver."""
    load_rollout_function(driver.function)
    name = f"{ROLLOUT_KEY}: {driver.function}"
    return in_separate_process(setup, name, partial(start_function, driver.function))


def start_function(reference: str) -> AbstractContextManager[Environment]:
    """Load the user's function in the environment's process, and return it as an environment."""
    return nullcontext(load_rollout_function(reference))
