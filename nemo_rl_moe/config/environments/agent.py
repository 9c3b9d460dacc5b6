# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The driver for programs that ask the model as clients of a server."""

from typing import ClassVar, Literal

from nemo_rl_moe.config.environments.base import DriverConfig
from nemo_rl_moe.config.schema_base import PathText, PositiveInt, Processes, StrictModel, Text


class AgentLimitsConfig(StrictModel):
    """Limits of agents. The time limit of a trajectory is `env.rollout_timeout_s`."""

    num_workers: Processes
    """Processes of agents on the driver's machine. Trajectories wait for a free one."""
    memory_mb: PositiveInt
    """Megabytes that an agent's process, and each process that it starts, may use."""


class AgentProgramLimitsConfig(AgentLimitsConfig):
    """Limits of agents that are the user's programs."""

    agents_per_worker: PositiveInt
    """Agents that a process runs at the same time. More than 1 needs an `async def`. A blocking agent delays the
    others."""


class EndpointDriverConfig(DriverConfig):
    """A driver whose processes ask the model through an OpenAI-compatible endpoint."""

    format: Text | None
    """Format in which the model writes calls of the tools that requests define. The names are the same as with the kind
    `tools`. null: the format of the chat template."""
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
        return self.program if isinstance(self.program, str) else " ".join(self.program)
