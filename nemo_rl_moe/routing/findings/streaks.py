# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Streaks of steps in which named conditions hold."""

from collections.abc import Collection, Iterator
from typing import Generic, TypeVar

Kind = TypeVar("Kind")


class Streaks(Generic[Kind]):
    def __init__(self) -> None:
        self._current: dict[Kind, tuple[int, int]] = {}

    def extend(self, step: int, kinds: Collection[Kind]) -> Iterator[tuple[Kind, int, int]]:
        """Extend the streaks of the conditions that hold at a step, and end all others. Yield (condition, first step,
        number of steps) for each.
        """
        self._current = {kind: streak for kind, streak in self._current.items() if kind in kinds}
        for kind in kinds:
            first, length = self._current.get(kind, (step, 0))
            self._current[kind] = first, length + 1
            yield kind, first, length + 1
