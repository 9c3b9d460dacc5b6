# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Fixtures for pytest wherever the package is installed: `assert_routes_agree` and `audit_routes`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def assert_routes_agree() -> Callable[..., None]:
    """Return `nemo_rl_moe.routing.audit.assertions.assert_routes_agree`."""
    from nemo_rl_moe.routing.audit.assertions import assert_routes_agree  # imports torch only for tests that use it

    return assert_routes_agree


@pytest.fixture(scope="session")
def audit_routes() -> Callable[..., None]:
    """Return a function that audits files like `nemo-rl-moe audit PATH OPTIONS`, and fails with its findings."""

    def audit(path: Path, *options: Any) -> None:
        from nemo_rl_moe.errors import UserError
        from nemo_rl_moe.routing.audit.command import run_words

        try:
            run_words([str(path), *map(str, options)])
        except UserError as error:
            raise AssertionError(str(error)) from None

    return audit
