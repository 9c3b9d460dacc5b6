# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""An environment that fails in every way an environment can; the response says in which."""

import itertools
import math
import os
import re
import signal
import sys
import time

from nemo_rl_moe.rewards.interface import ScoringItem


class UnprintableError(Exception):
    """Has no text that could be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def score(item: ScoringItem) -> object:
    """Do what the response says: a way to fail, or a number that is its reward."""
    if item.response.startswith("nap "):
        time.sleep(float(item.response.split()[1]))
        return 1.0
    failure = FAILURES.get(item.response)
    return float(item.response) if failure is None else failure()


def _raise() -> object:
    raise ValueError("no such tile\nsecond line")


def _raise_unprintable() -> object:
    raise UnprintableError


def _sleep() -> object:
    time.sleep(600)
    return 1.0


def _swallow_the_interruption() -> object:
    try:
        time.sleep(600)
    except BaseException:
        return 1.0


def _replace_the_interruption() -> object:
    try:
        time.sleep(600)
    except BaseException:
        raise ValueError("something else") from None


def _hang_in_c() -> object:
    """Keep the interpreter's lock for ever."""
    return any(itertools.repeat(False))


def _match_for_ages() -> object:
    return re.match(r"(a+)+$", "a" * 100 + "b")


def _ignore_the_alarm() -> object:
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    while True:
        time.sleep(0.1)


def _cancel_the_alarm() -> object:
    """Cancel the alarm, as libraries with time limits of their own do."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    while True:
        time.sleep(0.1)


def _patched_nan() -> object:
    math.isfinite = lambda value: True
    return math.nan


FAILURES = {
    "cancel": _cancel_the_alarm,
    "huge": lambda: 1e308,
    "patched nan": _patched_nan,
    "raise": _raise,
    "raise unprintable": _raise_unprintable,
    "sys.exit": lambda: sys.exit("enough"),
    "recurse": lambda: _recurse(0),
    "sleep": _sleep,
    "swallow": _swallow_the_interruption,
    "replace": _replace_the_interruption,
    "regex": _match_for_ages,
    "hang in c": _hang_in_c,
    "ignore": _ignore_the_alarm,
    "os._exit": lambda: os._exit(3),
    "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "nan": lambda: float("nan"),
    "inf": lambda: (float("-inf"), True),
    "word": lambda: "1.0",
    "none": lambda: None,
    "wrong pair": lambda: (1.0, 1),
    "triple": lambda: (1.0, True, "x"),
    "integer": lambda: 1,
    "half right": lambda: (0.5, True),
}


def _recurse(depth: int) -> object:
    return _recurse(depth + 1)
