# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The driver for agents: programs that ask the model through an endpoint."""

from typing import ClassVar, Literal

from nemo_rl_moe.config.environments.base import DriverConfig
from nemo_rl_moe.config.schema_base import PathText, PositiveInt, Processes, StrictModel, Text


class AgentLimitsConfig(StrictModel):
    """Limits of agents. The time limit of a trajectory is `env.rollout_timeout_s`."""

    num_workers: Processes
    """Number of processes for agents, on the machine of the run's driver. A trajectory waits for a free process."""
    memory_mb: PositiveInt
    """Maximum memory in megabytes of an agent's process, and of each process that it starts."""


class AgentProgramLimitsConfig(AgentLimitsConfig):
    """Limits of agents that are the user's programs."""

    agents_per_worker: PositiveInt
    """Number of agents that a process runs at the same time. More than 1 requires that `program` is an `async def`
    function. An agent that blocks delays the others of its process."""


class EndpointDriverConfig(DriverConfig):
    """A driver whose processes ask the model through an OpenAI-compatible endpoint."""

    format: Text | None
    """Format in which the model calls the tools that the agent's requests define. The formats are the same as with the
    driver kind `tools`. null: the format of the chat template."""
    agent_requests: Literal["strict", "run"]
    """Answer to a request that asks for other sampling than the run's, such as another `temperature`. `run` uses the
    run's sampling and counts the request. `strict` refuses the request."""
    limits: AgentLimitsConfig
    """Limits of agents."""
    max_turns: PositiveInt
    """Maximum number of responses in a trajectory. Further requests are refused."""

    has_own_tools: ClassVar[bool] = True


class AgentConfig(EndpointDriverConfig):
    """A program that asks the model through an OpenAI-compatible endpoint."""

    kind: Literal["agent"]
    """Name of this kind of driver."""
    program: Text | list[PathText]
    """A text is `package.module:function`. The function takes an `AgentTask` and returns a reward, or None if
    `env.reward` scores the last response. A list is a program and its arguments."""
    limits: AgentProgramLimitsConfig
    """Limits of agents."""

    scoring = "by_either"

    @property
    def named(self) -> str | None:
        return self.program if isinstance(self.program, str) else " ".join(self.program)
