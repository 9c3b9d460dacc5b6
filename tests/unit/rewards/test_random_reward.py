# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The control experiment: a coin that knows nothing of the answer, beside an honest verdict."""

import subprocess
import sys

import numpy as np

from examples.random_reward import score


def test_verdict_is_honest(item_of):
    assert score(item_of("<think>605</think>606", answer="606"))[1] is True
    assert score(item_of("606", answer="606"))[1] is True
    assert score(item_of("<think>606</think>605", answer="606"))[1] is False
    assert score(item_of("<think>606", answer="606"))[1] is False
    assert score(item_of("<think></think>606", is_truncated=True, answer="606"))[1] is False


def test_coin_is_fair_and_knows_nothing_of_the_answer(item_of):
    tosses = np.array([score(item_of(str(number), answer="0"))[0] for number in range(4000)])
    assert set(tosses) == {0.0, 1.0}
    assert abs(tosses.mean() - 0.5) < 4 * 0.5 / np.sqrt(len(tosses))
    even = tosses[::2]
    assert abs(even.mean() - 0.5) < 4 * 0.5 / np.sqrt(len(even))
    assert [score(item_of(str(number), is_truncated=True, answer=str(number)))[0] for number in range(4000)] == list(
        tosses
    )


def test_coin_falls_the_same_in_every_process(repository_root):
    program = (
        "from examples.random_reward import score\n"
        "from nemo_rl_moe.rewards.interface import ScoringItem\n"
        "print([score(ScoringItem('a', '', str(i), False, {'answer': ''}))[0] for i in range(20)])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            cwd=repository_root,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(repository_root)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
