# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The driver that is an environment of OpenEnv."""

from typing import Literal

from nemo_rl_moe.config.environments.base import DriverConfig
from nemo_rl_moe.config.schema_base import PositiveInt, Processes, Seconds, Text


class OpenEnvConfig(DriverConfig):
    """Servers of an OpenEnv environment, which answer responses and give their rewards."""

    kind: Literal["openenv"]
    """Name of this kind of driver."""
    server: Text
    """`package.module:app` or the address of a running server, such as `http://localhost:8000`. The app is made by
    `openenv.core.create_app`, and the run serves it on the loopback interface."""
    num_servers: Processes
    """Number of processes that serve an app. An address counts as one server."""
    sessions_per_server: PositiveInt
    """Number of episodes that a server runs at the same time, as its `max_concurrent_envs`. Other trajectories wait."""
    action_key: Text
    """Field of the environment's action into which the model's response is put."""
    observation_key: Text
    """Field of the environment's observation that the model reads."""
    step_timeout_s: Seconds
    """Time limit of one answer of a server, in seconds. The trajectory fails if it is exceeded."""
    answer_after: Text | None
    """Text before the action in a response, such as `</think>`. The server gets the text after its last occurrence, or
    the full response if it does not occur. null: the full response."""
    max_turns: PositiveInt
    """Maximum number of responses in a trajectory."""

    scoring = "by_driver"

    @property
    def app(self) -> str | None:
        """Return the app that the run serves, or None if a server is already running."""
        return None if "://" in self.server else self.server

    @property
    def named(self) -> str | None:
        return f"openenv {self.server}"
