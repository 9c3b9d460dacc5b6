# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The driver that is a program which asks the model as a client of a server."""

from typing import ClassVar, Literal

from nemo_rl_moe.config.environments.base import DriverConfig
from nemo_rl_moe.config.schema_base import PathText, PositiveInt, Processes, StrictModel, Text


class AgentLimitsConfig(StrictModel):
    """Limits of agents. That of a trajectory in time is `env.rollout_timeout_s`."""

    num_workers: Processes
    """Processes of agents on the driver's machine. Trajectories wait for a free one."""
    memory_mb: PositiveInt
    """Megabytes that the process of an agent may take, and each process that it starts."""


class AgentProgramLimitsConfig(AgentLimitsConfig):
    """Limits of agents that are programs of the user's."""

    agents_per_worker: PositiveInt
    """Agents that a process runs at the same time: more than 1 needs an `async def`. One that blocks its process keeps
    the others waiting."""


class EndpointDriverConfig(DriverConfig):
    """A driver that asks the model through an OpenAI-compatible endpoint, in processes of its own."""

    format: Text | None
    """Format in which the model writes calls of the tools that requests define. The names are those of the kind
    `tools`."""
    limits: AgentLimitsConfig
    """Limits of agents."""
    max_turns: PositiveInt
    """Most responses of a trajectory. Further requests are refused."""

    has_own_tools: ClassVar[bool] = True


class AgentConfig(EndpointDriverConfig):
    """A program that asks the model through an OpenAI-compatible endpoint."""

    kind: Literal["agent"]
    """This kind."""
    program: Text | list[PathText]
    """A text: `package.module:function`, which takes an `AgentTask` and returns a reward, or None if `env.reward`
    scores the last response. A list: a program and its arguments."""
    limits: AgentProgramLimitsConfig
    """Limits of agents."""

    scoring = "by_either"

    @property
    def named(self) -> str | None:
        """Return the function, or the command line."""
        return self.program if isinstance(self.program, str) else " ".join(self.program)
