# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Steps that teach nothing are findings, from as many in a row on as the threshold says."""

from nemo_rl_moe.routing.findings.tracker import Thresholds
from tests.unit.routing.findings.test_reward_signal import found_in

EQUAL = {"train/advantages/min": 0.0, "train/advantages/max": 0.0, "train/reward": 0.25}
SPREAD = {"train/advantages/min": -0.5, "train/advantages/max": 0.5, "train/reward": 0.25}


def test_equal_rewards_are_reported_once_an_episode() -> None:
    (finding,), begun = found_in([SPREAD, EQUAL, EQUAL, SPREAD, EQUAL, EQUAL, EQUAL, EQUAL, SPREAD])
    assert begun == [7]
    assert (finding.kind, finding.layer, finding.first_step, finding.last_step) == ("no_advantages", None, 5, 8)
    assert finding.is_over
    assert finding.text == (
        "every advantage has been 0 since step 5: rewards that are compared are equal (mean 0.25), and teach nothing"
    )


def test_responses_that_are_all_cut() -> None:
    cut, nearly = {**SPREAD, "train/truncation_rate": 1.0}, {**SPREAD, "train/truncation_rate": 0.99}
    (finding,), begun = found_in([nearly, cut, cut, cut, cut])
    assert begun == [4]
    assert (finding.kind, finding.is_over) == ("all_truncated", False)
    assert finding.text == "every response has been truncated at the length limit since step 2"


def test_a_reward_function_that_is_asked_of_less_than_half() -> None:
    half, most = ({**SPREAD, "train/truncation_rate_unscored": share} for share in (0.5, 0.82))
    (finding,), begun = found_in([half, most, most, half])
    assert begun == [2], "at once"
    assert (finding.kind, finding.first_step, finding.last_step) == ("unscored_responses", 2, 3)
    assert finding.is_over
    assert finding.text == (
        "82% of the responses were truncated and got reward 0 without being scored, and more than half have been since"
        " step 2: env.score_truncated is false; true scores them, and a larger policy.generation.max_new_tokens"
        " truncates fewer"
    )


def test_both_at_the_same_time_are_two() -> None:
    findings, begun = found_in([{**EQUAL, "train/truncation_rate": 1.0}] * 4)
    assert {finding.kind for finding in findings} == {"no_advantages", "all_truncated"}
    assert begun == [3]


def test_none_without_a_threshold_or_without_the_metrics() -> None:
    assert found_in([EQUAL] * 9, limits=Thresholds(None, None, None, 1)) == ([], [])
    assert found_in([{"train/loss": 1.0}] * 9) == ([], [])
    assert found_in([{"train/advantages/max": 0.0}] * 9) == ([], [])
