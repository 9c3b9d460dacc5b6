# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Cases of a parameter by the list of tests that they belong to."""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def full(*values: Any, **options: Any) -> Any:
    """Return a case of continuous integration."""
    return pytest.param(*values, marks=pytest.mark.full, **options)


def slow(*values: Any, **options: Any) -> Any:
    """Return a slow case."""
    return pytest.param(*values, marks=pytest.mark.slow, **options)


def listed(cases: Iterable[Any], quick: Container[Any] = (), in_full: Container[Any] = ()) -> list[Any]:
    """Return a case for each value or tuple of values: of the quick list, of continuous integration, or slow."""
    found = []
    for case in cases:
        marked = pytest.param if case in quick else full if case in in_full else slow
        found.append(marked(*case) if isinstance(case, tuple) else marked(case))
    return found
