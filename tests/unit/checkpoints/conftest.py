# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.saving_runs import Place, Run


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Run]:
    """Makes a run that saves below the test's folder."""

    def make(*overrides: str, **changes: Any) -> Run:
        return Run(tmp_path, *overrides, **changes)

    return make


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """A place where no run has been."""
    return Place(tmp_path)
