# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Reward functions that fail in every way, cost a run its engine, say which process scores, or are learned quickly."""

import itertools
import math
import os
import re
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

from nemo_rl_moe.rewards.interface import ScoringItem


class UnprintableError(Exception):
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


MARK = "MARK_OF_THE_KILLED_ENGINE"
"""Variable of a run whose engine is to be killed: a file that says that it has been."""
ENGINE_TITLE = "ray::VllmWorker"


def share_of_digits(item: ScoringItem) -> float:
    """Return how many of twelve characters are digits; where a run has the mark, the first response kills its
    engine.
    """
    mark = os.environ.get(MARK)
    if mark and not Path(mark).exists():
        for process in psutil.process_iter():
            with suppress(psutil.Error, ProcessLookupError):
                if "".join(process.cmdline()[:1]).startswith(ENGINE_TITLE) and process.environ().get(MARK) == mark:
                    os.kill(process.pid, signal.SIGKILL)
                    Path(mark).touch()
    return sum(character.isdigit() for character in item.response) / 12


NOTES = "DRILL_REWARD_WORKERS"
"""Environment variable with the folder in which each process that scores leaves its id."""
SECONDS_A_RESPONSE = 0.01
NUM_REWARDS = 8

if NOTES in os.environ:
    Path(os.environ[NOTES], str(os.getpid())).touch()


def grade(item: ScoringItem) -> float:
    """Return a reward between 0 and 1 that depends on all characters of the response and on nothing else."""
    time.sleep(SECONDS_A_RESPONSE)
    return sum(map(ord, item.response)) % NUM_REWARDS / (NUM_REWARDS - 1)


def share_of_vowels(item: ScoringItem) -> float:
    """Reward of which most groups have a spread."""
    return sum(letter in "aeiou" for letter in item.response) / max(1, len(item.response))
