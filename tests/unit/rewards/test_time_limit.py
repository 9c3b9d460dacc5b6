# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The limit on one response, and what becomes of errors."""

import re
import signal
import time

import pytest

from nemo_rl_moe.alarms import TimeIsUp, interrupted_after
from nemo_rl_moe.errors import one_line
from nemo_rl_moe.rewards.interface import Fault, Score
from nemo_rl_moe.rewards.worker import score_within


class Returns:
    """An environment that does one thing."""

    def __init__(self, action):
        self.action = action

    def score(self, item):
        return self.action()


def raise_(error):
    raise error


def sleep_and_swallow():
    try:
        time.sleep(600)
    except BaseException:
        return Score(1.0, True)


def sleep_and_replace():
    try:
        time.sleep(600)
    finally:
        raise ValueError("cleaning up went wrong")


@pytest.fixture(autouse=True)
def alarm_is_given_back(own_alarm):
    """Neither a handler nor a timer stays."""
    before = signal.getsignal(signal.SIGALRM)
    yield
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_in_time(item_of):
    assert score_within(100.0, Returns(lambda: Score(0.5, True)), item_of("")) == Score(0.5, True)
    with pytest.raises(KeyError), interrupted_after(100.0):
        raise KeyError("x")


@pytest.mark.parametrize("action", [lambda: time.sleep(600), sleep_and_swallow, sleep_and_replace])
def test_too_late(item_of, action):
    score = score_within(0.1, Returns(action), item_of(""))
    assert score == Score(0.0, False, Fault.TIMEOUT, "took longer than 0.1 s")


def test_python_code_is_interrupted_and_nothing_rings_later():
    with pytest.raises(TimeIsUp), interrupted_after(0.05):
        while True:
            pass
    with interrupted_after(0.05):
        pass
    time.sleep(0.1)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda: raise_(ValueError("first\nsecond")), "ValueError: first"),
        (lambda: raise_(SystemExit(3)), "SystemExit: 3"),
        (lambda: raise_(KeyboardInterrupt()), "KeyboardInterrupt"),
    ],
)
def test_errors(item_of, action, message):
    """Reported with the line of the file that raised."""
    score = score_within(100.0, Returns(action), item_of(""))
    assert score == Score(0.0, False, Fault.ERROR, score.message)
    assert re.fullmatch(rf"{message} \(test_time_limit\.py:\d+\)", score.message)


def test_one_line_is_short():
    assert one_line(ValueError("a" * 1000)) == f"ValueError: {'a' * 288}"
    assert one_line(ValueError("  \n ")) == "ValueError"
