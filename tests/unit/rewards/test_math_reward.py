# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Answers that are no mathematics, and what the library that compares them may not do."""

import logging
import signal

import math_verify.grader
import math_verify.parser
import pytest

from nemo_rl_moe.rewards.math import MathReward


@pytest.fixture(scope="module")
def environment():
    return MathReward()


def test_an_answer_that_is_no_mathematics_is_the_data_s_fault(environment, item_of):
    with pytest.raises(ValueError, match=r"the record's answer cannot be read as mathematics: '\$\$'"):
        environment.score(item_of("1", answer="$$"))


@pytest.mark.usefixtures("own_alarm")
def test_library_neither_warns_nor_takes_the_alarm(environment, item_of, caplog, monkeypatch):
    for module in (math_verify.parser, math_verify.grader):
        monkeypatch.setattr(module, "TIMEOUT_WARNING_SHOWN", False)  # it warns once
    before = signal.getsignal(signal.SIGALRM)
    signal.setitimer(signal.ITIMER_REAL, 100.0)
    with caplog.at_level(logging.DEBUG):
        environment.score(item_of("1", answer="1"))
    assert signal.setitimer(signal.ITIMER_REAL, 0.0)[0] > 90.0
    assert signal.getsignal(signal.SIGALRM) is before
    assert not [record for record in caplog.records if record.levelno == logging.WARNING]
