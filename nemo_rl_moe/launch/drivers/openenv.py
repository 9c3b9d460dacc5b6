# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The driver that is an environment of OpenEnv: the library checked before anything starts, and its servers."""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from nemo_rl_moe.config.environments.openenv import OpenEnvConfig
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.launch.drivers.setup import DriverSetup, StartDriver
from nemo_rl_moe.launch.setup import ModelRun
from nemo_rl_moe.rollouts.environment import Environment
from nemo_rl_moe.rollouts.libraries.openenv_environment import OpenEnvRollout
from nemo_rl_moe.rollouts.libraries.openenv_servers import OpenEnvServer
from nemo_rl_moe.rollouts.rollout_function import RolloutFunction
from nemo_rl_moe.runs.loggers.console import ConsoleLogger


def check_openenv(driver: OpenEnvConfig) -> None:
    """Check that the library is installed.

    Raises:
        ConfigurationError: It is not.
    """
    if importlib.util.find_spec("openenv") is None:
        raise ConfigurationError("env.driver.kind: openenv cannot be imported; pip install 'nemo-rl-moe[openenv]'")


def prepare_openenv(driver: OpenEnvConfig, setup: DriverSetup) -> StartDriver:
    """Return the start of the servers: they are tried when they start."""

    def start(run: ModelRun, warn: Callable[[str], None]) -> Environment:
        servers = run.use(running_servers(driver, run.console))
        rollout = OpenEnvRollout(servers, driver, score_truncated=setup.env.score_truncated)
        return RolloutFunction(rollout, str(driver.named))

    return start


@contextmanager
def running_servers(driver: OpenEnvConfig, console: ConsoleLogger) -> Iterator[list[OpenEnvServer]]:
    """Start the servers of an app, and stop them at the end. An address needs none."""
    app = driver.app
    servers = [] if app is None else [OpenEnvServer(app) for _ in range(driver.num_servers)]
    with ExitStack() as stack:
        if servers:
            with console.phase(f"starting the servers of the environment ({app})"):
                for server in servers:
                    stack.callback(server.stop)
                    server.start()
                for server in servers:
                    server.wait()
        yield servers
