# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Configurations and responses for environments."""

from collections.abc import Callable
from typing import Any

import pytest

from nemo_rl_moe.rewards.interface import ScoringItem


@pytest.fixture
def item_of() -> Callable[..., ScoringItem]:
    """Makes a response to be scored."""

    def make(response: str, is_truncated: bool = False, **record: Any) -> ScoringItem:
        return ScoringItem("data.jsonl:1", "the prompt", response, is_truncated, record)

    return make
