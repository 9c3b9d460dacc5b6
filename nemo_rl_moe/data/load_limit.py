# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Bounds the time that reading a data set may take: a pipe, a network or a mount may hang for ever."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from nemo_rl_moe.environments.time_limit import TimeIsUp, interrupted_after
from nemo_rl_moe.errors import EXIT_BAD_INPUT, DataError

Parsed = TypeVar("Parsed")

GRACE_S = 5.0
"""Seconds after the limit at which a read that cannot be interrupted ends the program."""

_last_sample = ""


@contextmanager
def load_limit(limit_s: float, name: str) -> Iterator[None]:
    """Bounds the time that reading a data set inside may take.

    Only on the main thread, and before anything has been started that needs an orderly end: what does not let itself
    be interrupted, such as a mount whose server is gone, ends the process with exit code 2.

    Args:
        limit_s: Seconds that it may take.
        name: What the user calls the data set.

    Raises:
        DataError: It took longer.
    """
    global _last_sample
    _last_sample = ""
    watchdog = threading.Timer(limit_s + GRACE_S, _end_the_program, (limit_s, name))
    watchdog.daemon = True
    watchdog.start()
    try:
        with interrupted_after(limit_s):
            yield
    except TimeIsUp:
        raise DataError(_problem(limit_s, name)) from None
    finally:
        watchdog.cancel()


def noting_samples(parse: Callable[[object, str], Parsed]) -> Callable[[object, str], Parsed]:
    """The same parser; which sample was the last one is known should the time run out."""

    def parse_and_note(record: object, sample_id: str) -> Parsed:
        global _last_sample
        _last_sample = sample_id
        return parse(record, sample_id)

    return parse_and_note


def _problem(limit_s: float, name: str) -> str:
    last = f"the last sample that was read is {_last_sample}" if _last_sample else "no sample was read"
    return f"{name}: reading it took longer than data.load_timeout_s = {limit_s:g} s; {last}"


def _end_the_program(limit_s: float, name: str) -> None:
    print(f"error: {_problem(limit_s, name)}", file=sys.stderr, flush=True)
    os._exit(EXIT_BAD_INPUT)
