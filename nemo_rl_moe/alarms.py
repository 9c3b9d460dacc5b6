# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Time limits on calls: an alarm signal interrupts the main thread."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class TimeIsUp(BaseException):
    """A call took too long. Not an `Exception`, so that `except Exception` does not catch it."""


@contextmanager
def interrupted_after(limit_s: float) -> Iterator[None]:
    """Interrupt the body of this context after `limit_s` seconds. Only works in the main thread.

    Raises:
        TimeIsUp: The body took longer. Also raised if the body caught the interruption and continued.
    """
    rang = False

    def on_alarm(signal_number: int, frame: Any) -> None:
        nonlocal rang
        rang = True
        raise TimeIsUp

    previous = signal.signal(signal.SIGALRM, on_alarm)
    try:
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    if rang:
        raise TimeIsUp
