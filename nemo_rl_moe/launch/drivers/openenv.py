# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The driver that is an environment of OpenEnv: the check of the library, and the servers."""

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
    """Check that the library is installed."""
    if importlib.util.find_spec("openenv") is None:
        raise ConfigurationError("env.driver.kind: openenv cannot be imported; pip install 'nemo-rl-moe[openenv]'")


def prepare_openenv(driver: OpenEnvConfig, setup: DriverSetup) -> StartDriver:
    """Return the function that starts the servers. They are not checked before."""
    start = partial(running_servers, driver, score_truncated=setup.env.score_truncated)
    return in_separate_process(setup, f"env.driver: {driver.named}", start)


@contextmanager
def running_servers(driver: OpenEnvConfig, *, score_truncated: bool) -> Iterator[Environment]:
    """Run the servers of an app within the context, in the process of their environment.

    An address needs no servers.
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
