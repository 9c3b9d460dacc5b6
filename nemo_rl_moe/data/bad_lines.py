# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Keeps count of the lines of a data set that cannot be used."""

from nemo_rl_moe.data.records import BadLine
from nemo_rl_moe.errors import DataError

MAX_PROBLEMS_SHOWN = 20


class BadLineLog:
    """Counts bad lines and remembers the first of them.

    Attributes:
        count: Bad lines so far.
        shown: The first 20, one text each.
    """

    def __init__(self) -> None:
        self.count = 0
        self.shown: list[str] = []

    def add(self, line: BadLine) -> None:
        """Notes a line."""
        self.count += 1
        if len(self.shown) < MAX_PROBLEMS_SHOWN:
            self.shown.append(str(line))

    def raise_if_any(self, name: str) -> None:
        """For `data.on_bad_line: stop`, when all lines have been looked at.

        Args:
            name: The data set.

        Raises:
            DataError: There were bad lines; lists the first 20.
        """
        if not self.count:
            return
        more = self.count - len(self.shown)
        last = [f"{name}: and {counted(more, 'more bad line')}"] if more else []
        advice = f"{name}: data.on_bad_line=skip leaves such lines out and counts them"
        raise DataError([*self.shown, *last, advice])


def counted(number: int, noun: str) -> str:
    """A number with its noun: `1 example`, `2,000 examples`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
