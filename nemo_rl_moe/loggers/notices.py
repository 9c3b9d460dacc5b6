# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Holds back what packages tell on their own, which would mix with the console's lines."""

import contextlib
import logging
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def quiet(*logger_names: str, least: int = logging.ERROR) -> Iterator[None]:
    """Inside, these loggers of Python's `logging` tell nothing below a level."""
    loggers = [logging.getLogger(name) for name in logger_names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(least)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


class Notices:
    """Keeps messages and warnings of all threads until `show`, so that the console belongs to one thread alone.

    Args:
        message: Shows a line.
        warn: Shows a warning; standard error is used where it fails.
    """

    def __init__(self, message: Callable[[str], None], warn: Callable[[str], None]):
        self._message, self._warn = message, warn
        self._lines: deque[tuple[bool, str]] = deque()

    def message(self, text: str) -> None:
        """Leaves a line; from any thread."""
        self._lines.append((False, text))

    def warn(self, text: str) -> None:
        """Leaves a warning; from any thread."""
        self._lines.append((True, text))

    def show(self) -> None:
        """Shows what was left, in that order."""
        while self._lines:
            is_warning, text = self._lines.popleft()
            try:
                (self._warn if is_warning else self._message)(text)
            except Exception:
                # The way to the user may itself be what broke, as with a closed pipe behind standard output.
                with contextlib.suppress(Exception):
                    print(f"warning: {text}" if is_warning else text, file=sys.stderr)


def reason_of(error: BaseException) -> str:
    """An error in one line."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"the package {error.name} is not installed"
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
