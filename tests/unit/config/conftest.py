# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_rl_moe.config.loading import load_config, load_dpo_config, load_grpo_config
from nemo_rl_moe.errors import ConfigurationError

Problems = Callable[..., list[str]]


@pytest.fixture
def problems_of() -> Problems:
    """The lines that the tiny exemplar, changed by these overrides, is refused with."""

    def problems(*overrides: str, config: str | Path = "sft_tiny_moe.yaml", check_paths: bool = False) -> list[str]:
        with pytest.raises(ConfigurationError) as caught:
            load_config(config, overrides, check_paths=check_paths)
        return caught.value.problems

    return problems


@pytest.fixture
def grpo_problems_of() -> Problems:
    """The lines that the tiny exemplar of GRPO, changed by these overrides, is refused with."""

    def problems(*overrides: str, config: str | Path = "grpo_tiny_moe.yaml", check_paths: bool = False) -> list[str]:
        with pytest.raises(ConfigurationError) as caught:
            load_grpo_config(config, overrides, check_paths=check_paths)
        return caught.value.problems

    return problems


@pytest.fixture
def dpo_problems_of() -> Problems:
    """The lines that the tiny exemplar of DPO, changed by these overrides, is refused with."""

    def problems(*overrides: str, config: str | Path = "dpo_tiny_moe.yaml", check_paths: bool = False) -> list[str]:
        with pytest.raises(ConfigurationError) as caught:
            load_dpo_config(config, overrides, check_paths=check_paths)
        return caught.value.problems

    return problems
