# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Configurations and responses for environments."""

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

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
def item_of() -> Callable[..., ScoringItem]:
    """Makes a response to be scored."""

    def make(response: str, is_truncated: bool = False, **record: Any) -> ScoringItem:
        return ScoringItem("data.jsonl:1", "the prompt", response, is_truncated, record)

    return make
