# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The task of an agent, and its result."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class AgentResult:
    """Result of an agent with more than a reward.

    Attributes:
        reward: A number, or several by name. If None, `env.reward` scores the last response.
        is_correct: Whether the trajectory is right. If None, it is right if its reward is at least 1.
        metrics: Further numbers by name, which are logged.
        turn_rewards: Id of a reply of the model -> reward of this response, in addition to `reward`.
    """

    reward: Any
    is_correct: bool | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    turn_rewards: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class AgentTask:
    """One trajectory for an agent. Each attempt at each response to a prompt is a separate task.

    Attributes:
        sample_id: Source of the prompt, such as file and line.
        record: All fields of the prompt's record in the data.
        messages: The prompt. The agent need not send it to the model.
        base_url: URL of the endpoint for this trajectory alone.
        api_key: Key of this run.
    """

    sample_id: str
    record: Mapping[str, Any]
    messages: Sequence[Mapping[str, Any]]
    base_url: str
    api_key: str
    model: str
