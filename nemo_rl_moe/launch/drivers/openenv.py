# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The driver that is an environment of OpenEnv: checks the library, and starts the servers."""

import importlib.util
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from nemo_rl_moe.config.environments.openenv import OpenEnvConfig
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.launch.drivers.setup import DriverSetup, StartDriver, in_separate_process
from nemo_rl_moe.rollouts.environment import Environment
from nemo_rl_moe.rollouts.libraries.openenv_environment import OpenEnvRollout
from nemo_rl_moe.rollouts.libraries.openenv_servers import OpenEnvServer
from nemo_rl_moe.rollouts.rollout_function import RolloutFunction


def check_openenv(driver: OpenEnvConfig) -> None:
    """Check that the library is installed. Raises `ConfigurationError` if not."""
    if importlib.util.find_spec("openenv") is None:
        raise ConfigurationError("env.driver.kind: openenv cannot be imported; pip install 'nemo-rl-moe[openenv]'")


def prepare_openenv(driver: OpenEnvConfig, setup: DriverSetup) -> StartDriver:
    """Return the function that starts the driver with its servers. The servers are not checked before."""
    start = partial(running_servers, driver, score_truncated=setup.env.score_truncated)
    return in_separate_process(setup, f"env.driver: {driver.named}", start)


@contextmanager
def running_servers(driver: OpenEnvConfig, *, score_truncated: bool) -> Iterator[Environment]:
    """Run the servers of an app within this context, and yield the environment. Called in the environment's process.

    If the configuration has the address of a running server, no servers are started.
    """
    app = driver.app
    servers = [] if app is None else [OpenEnvServer(app) for _ in range(driver.num_servers)]
    with ExitStack() as stack:
        for server in servers:
            stack.callback(server.stop)
            server.start()
        for server in servers:
            server.wait()
        rollout = OpenEnvRollout(servers, driver, score_truncated=score_truncated)
        yield RolloutFunction(rollout, str(driver.named))
