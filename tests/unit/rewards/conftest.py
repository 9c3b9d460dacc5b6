# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Configurations and responses for environments."""

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nemo_rl_moe.config.schema_environment import EnvironmentConfig
from nemo_rl_moe.rewards.interface import ScoringItem


@pytest.fixture
def own_alarm() -> Iterator[None]:
    """A process has one alarm, which pytest-timeout uses too: taken from it, and given back."""
    handler = signal.getsignal(signal.SIGALRM)
    left, interval = signal.setitimer(signal.ITIMER_REAL, 0.0)
    yield
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, left, interval)


@pytest.fixture
def env_config() -> Callable[..., EnvironmentConfig]:
    """Makes an `env` section."""

    def make(name: str, **changes: Any) -> EnvironmentConfig:
        settings = {
            "name": name,
            "num_workers": 1,
            "timeout_s": 60.0,
            "on_failure": "leave_out",
            "rollout_timeout_s": 600.0,
            "tools": [],
            "mcp_servers": {},
            "tool_parameters": {},
            "tool_format": None,
            "agent": None,
            "agent_command": [],
            "agent_limits": {"num_workers": 1, "memory_mb": 1024},
            "tool_limits": {
                "num_workers": 1,
                "call_timeout_s": 10.0,
                "turn_timeout_s": 30.0,
                "max_result_characters": 4000,
                "memory_mb": 1024,
            },
            "max_turns": 8,
            "tool_call_cost": 0.0,
            "rewritten_turns": "begin_anew",
            "answer_after": None,
            "score_truncated": False,
            "reasoning_gym": None,
            "callable": None,
            "openenv": None,
            "reward_weights": None,
            "parameters": {},
            "rollout": None,
        }
        return EnvironmentConfig.model_validate(settings | changes)

    return make


@pytest.fixture
def item_of() -> Callable[..., ScoringItem]:
    """Makes a response to be scored."""

    def make(response: str, is_truncated: bool = False, **record: Any) -> ScoringItem:
        return ScoringItem("data.jsonl:1", "the prompt", response, is_truncated, record)

    return make
