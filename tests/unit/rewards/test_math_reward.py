# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Answers compared as mathematics."""

import logging
import signal

import math_verify.grader
import math_verify.parser
import pytest

from nemo_rl_moe.rewards.interface import Score
from nemo_rl_moe.rewards.math import MathReward


@pytest.fixture(scope="module")
def environment():
    return MathReward()


@pytest.mark.parametrize(
    ("answer", "response"),
    [
        ("606", "606"),
        ("606", r"so it is \boxed{606}"),
        (r"-\frac{2}{3}", "the value is $-2/3$."),
        ("0.5", r"\boxed{\frac12}"),
        (r"\boxed{1/2}", "$0.5$"),
        ("$x=5$", r"\boxed{5}"),
        ("1,234", "The answer is 1234"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"$(3, \pi/2)$"),
        ("2^{10}", "1024"),
        # Answers of published sets: money, matrices, percent, degrees, text, choices, intervals, GSM8K's working.
        (r"\$18", r"\boxed{18}"),
        (r"\$18", r"\boxed{\$18}"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}"),
        (r"\begin{pmatrix}1\\[2pt]2\end{pmatrix}", r"\boxed{\begin{pmatrix}1\\[2pt]2\end{pmatrix}}"),
        (r"50\%", r"\boxed{0.5}"),
        (r"90^\circ", r"\boxed{90}"),
        (r"\text{Evelyn}", r"\boxed{\text{Evelyn}}"),
        ("B", r"\boxed{B}"),
        ("[0, 1)", r"\boxed{[0,1)}"),
        ("x=5", r"\boxed{5}"),
        (r"\(18\)", r"\boxed{18}"),
        (r"\[18\]", r"\boxed{18}"),
        ("He sold 48/2 = <<48/2=24>>24, and then 24+48 = 72.\n#### 72", r"\boxed{72}"),
        # The last box, and boxes that are one answer.
        ("3", r"First I thought \boxed{2}. Wait, so it is \boxed{3}."),
        ("3", r"First $\boxed{2}$. Wait, so it is $\boxed{3}$."),
        ("3", r"\boxed{2 is wrong. It is \boxed{3}."),
        ("1,2", r"So \boxed{1} and \boxed{2}."),
        ("1,2", r"Not \boxed{7}; it is \boxed{1}, \boxed{2}"),
    ],
)
def test_equal_values(environment, item_of, answer, response):
    assert environment.score(item_of(response, answer=answer)) == Score(1.0, True)


@pytest.mark.parametrize(
    ("answer", "response"),
    [
        ("606", "607"),
        ("606", "6060"),
        ("606", "-606"),
        ("606", "606 at first, then 607"),
        ("606", r"\boxed{"),
        ("606", "no idea"),
        ("606", ""),
        ("(1, 2)", r"\boxed{(2, 1)}"),
        ("2", r"First I thought \boxed{2}. Wait, so it is \boxed{3}."),
        (r"\$18", r"\boxed{19}"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{pmatrix}2\\1\end{pmatrix}}"),
        ("B", r"\boxed{C}"),
    ],
)
def test_other_values(environment, item_of, answer, response):
    assert environment.score(item_of(response, answer=answer)) == Score(0.0, False)


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
