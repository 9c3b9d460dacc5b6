# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The task that an agent gets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class AgentResult:
    """What an agent may return in place of a reward alone.

    Attributes:
        reward: A number, or several by name; None: `env.reward` scores the last response.
        is_correct: Whether the trajectory is right; None: it is from a reward of 1 on.
        metrics: Further numbers by name, which are logged.
    """

    reward: Any
    is_correct: bool | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class AgentTask:
    """One trajectory for an agent. Each attempt at each response to a prompt is a task of its own.

    Attributes:
        sample_id: Where the prompt came from.
        record: Whatever the data say of it.
        messages: The prompt, as the agent may send it to the model, or not.
        base_url: Of the endpoint, for this trajectory alone.
        api_key: Of this run.
        model: Name of the model.
    """

    sample_id: str
    record: Mapping[str, Any]
    messages: Sequence[Mapping[str, Any]]
    base_url: str
    api_key: str
    model: str
