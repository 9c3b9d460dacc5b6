# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_moe.config.loading import load_config, load_dpo_config, load_grpo_config
from nemo_rl_moe.errors import ConfigurationError

Problems = Callable[..., list[str]]


def refused(call: Callable[..., object], *arguments: Any, **options: Any) -> list[str]:
    """The lines that a call is refused with."""
    with pytest.raises(ConfigurationError) as caught:
        call(*arguments, **options)
    return caught.value.problems


def problems_with(load: Callable[..., object], exemplar: str) -> Problems:
    """The lines that an exemplar, changed by overrides, is refused with."""

    def problems(*overrides: str, config: str | Path = exemplar, check_paths: bool = False) -> list[str]:
        return refused(load, config, overrides, check_paths=check_paths)

    return problems


def about_keys(found: Mapping[str, str]) -> list[tuple[str, str]]:
    """Overrides, each with the line on its own key: the key, a colon, and what the table has for it."""
    return [(override, f"{override.lstrip('+~').partition('=')[0]}: {rest}") for override, rest in found.items()]


@pytest.fixture
def problems_of() -> Problems:
    return problems_with(load_config, "sft_tiny_moe.yaml")


@pytest.fixture
def grpo_problems_of() -> Problems:
    return problems_with(load_grpo_config, "grpo_tiny_moe.yaml")


@pytest.fixture
def dpo_problems_of() -> Problems:
    return problems_with(load_dpo_config, "dpo_tiny_moe.yaml")
