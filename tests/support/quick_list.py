# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The quick list of a subject with many alike cases: a few of them; continuous integration runs all."""

from collections.abc import Container, Iterable, Sequence
from typing import Any, TypeVar

import pytest

Case = TypeVar("Case")

_SHARE = 4
# A prime: of the product of switches that have two, three or four values, every fifth holds every pair of values.
_STRIDE = 5
_is_quick = False


def begin(marks: str) -> None:
    """Note, before test modules are imported, which marks pytest selects by."""
    global _is_quick
    _is_quick = "not full" in marks


def examples(number: int) -> int:
    """Return how many examples a property is tried on: a quarter in the quick list."""
    return -(-number // _SHARE) if _is_quick else number


def few_of(cases: Sequence[Case]) -> Sequence[Case]:
    """Return the cases of a loop in one test: every fifth in the quick list."""
    return cases[::_STRIDE] if _is_quick else cases


def some_of(cases: Iterable[Any], number: int, most: int | None = None) -> list[Any]:
    """Return all cases of a parameter, marked by the list of tests that they belong to.

    Args:
        cases: As for `parametrize`; a tuple has a value for each of several names.
        number: Cases of the quick list, spread evenly.
        most: Cases of continuous integration, spread evenly. None runs all there. The others are `slow`.
    """
    params = [_as_param(case) for case in cases]
    quick, in_full = _spread(number, len(params)), _spread(len(params) if most is None else most, len(params))
    return [
        case if place in quick else _marked(case, pytest.mark.full if place in in_full else pytest.mark.slow)
        for place, case in enumerate(params)
    ]


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


def _spread(number: int, count: int) -> set[int]:
    return {round(place * (count - 1) / max(number - 1, 1)) for place in range(number)}


def _marked(case: Any, mark: pytest.MarkDecorator) -> Any:
    return pytest.param(*case.values, id=case.id, marks=(*case.marks, mark))


def _as_param(case: Any) -> Any:
    if isinstance(case, type(pytest.param())):
        return case
    return pytest.param(*case) if isinstance(case, tuple) else pytest.param(case)
