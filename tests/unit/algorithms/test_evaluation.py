# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Estimates of an evaluation, worked out by hand, and their standard error against many evaluations."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from nemo_rl_moe.algorithms.evaluation import Estimate, estimate, passes, summarise_evaluation
from nemo_rl_moe.rollouts.trajectory import Trajectory
from tests.support.grpo_fakes import LEAVE_OUT
from tests.support.grpo_inputs import tokens_of


def trajectory(reward: float, is_correct: bool) -> Trajectory:
    return Trajectory(
        sample_id="p:1",
        group_id="p:1#0",
        sequences=(tokens_of([3], [4]),),
        reward=reward,
        is_correct=is_correct,
        finish_reason="stop",
    )


def answered(answers: str, right: str = "") -> list[Trajectory]:
    """Responses with one letter as answer each, `-` for none."""
    return [replace(trajectory(float(each in right), each in right), answer=each.replace("-", "")) for each in answers]


def groups(rewards: Sequence[float]) -> list[Trajectory]:
    return [trajectory(reward, reward >= 1) for reward in rewards]


def test_three_prompts_of_four_responses() -> None:
    summary = summarise_evaluation(groups([1, 0, 0, 0, *[1, 1, 0.5, 0], *[0, 0, 0, 0]]), 4, None, LEAVE_OUT)
    # Shares of the prompts: 1/4, 2/4, 0; their mean 1/4; s = 1/4.
    assert summary.accuracy.mean == pytest.approx(0.25)
    assert summary.accuracy.standard_error == pytest.approx(0.25 / 3**0.5)
    # Means of the rewards: 2/8, 5/8, 0.
    assert summary.reward is not None
    assert summary.reward.mean == pytest.approx(7 / 24)
    # Of 6 pairs of responses, 3 hold the one right one; of two right ones all but one pair do.
    assert summary.pass_at_k.keys() == {1, 2, 4}
    assert summary.pass_at_k[1] == summary.accuracy
    assert summary.pass_at_k[2].mean == pytest.approx((3 / 6 + 5 / 6 + 0) / 3)
    assert summary.pass_at_k[4].mean == pytest.approx(2 / 3)
    assert summary.pass_at_k[4].standard_error == pytest.approx((1 / 3) ** 0.5 / 3**0.5)


def test_one_response_has_pass_at_1_alone() -> None:
    summary = summarise_evaluation(groups([1, 0]), 1, None, LEAVE_OUT)
    assert (summary.pass_at_k.keys(), summary.majority) == ({1}, None)


@pytest.mark.parametrize(
    ("answers", "right", "expected"),
    [
        ("aab-", "a", 1.0),
        ("abb-", "a", 0.0),
        ("ab--", "a", 0.5),
        ("abc-", "a", 1 / 3),
        ("aabb", "ab", 1.0),
        ("---a", "a", 1.0),
        ("----", "", 0.0),
    ],
)
def test_the_most_frequent_answer_counts_and_ties_in_proportion(answers: str, right: str, expected: float) -> None:
    summary = summarise_evaluation([*answered(answers, right), *answered("xxxx")], 4, None, LEAVE_OUT)
    if not answers.strip("-"):
        assert summary.majority == Estimate(0.0, 0.0)
        return
    assert summary.majority is not None
    assert summary.majority.mean == pytest.approx(expected / 2)
    assert summary.majority.standard_error == pytest.approx(expected / 2)


def test_without_answers_there_is_no_majority_vote() -> None:
    assert summarise_evaluation(groups([1, 0, 1, 0]), 2, None, LEAVE_OUT).majority is None


@pytest.mark.parametrize(
    ("threshold", "expected"), [(None, [True, False, False]), (0.5, [False, True, False]), (0.3, [True, True, False])]
)
def test_what_passes(threshold: float | None, expected: list[bool]) -> None:
    # An environment may call a response right whatever its reward.
    responses = [trajectory(0.3, True), trajectory(0.5, False), trajectory(-1.0, False)]
    assert passes(responses, 1, threshold)[:, 0].tolist() == expected


def test_one_prompt_has_no_standard_error() -> None:
    assert estimate(torch.tensor([0.5])) == Estimate(0.5, None)
    assert str(estimate(torch.tensor([0.5]))) == "0.5000"


def test_standard_error_is_the_spread_of_many_evaluations() -> None:
    generator = torch.Generator().manual_seed(3)

    def evaluation() -> torch.Tensor:
        # Prompts of different difficulty, eight responses each: the responses are not independent.
        difficulty = torch.rand(50, 1, generator=generator).square()
        return (torch.rand(50, 8, generator=generator) < difficulty).double().mean(dim=1)

    many = [estimate(evaluation()) for _ in range(2000)]
    spread = float(torch.tensor([each.mean for each in many]).std())
    reported = float(torch.tensor([each.standard_error for each in many]).mean())
    assert reported == pytest.approx(spread, rel=0.05)
    # Taken for 400 independent responses, the error would be reported too small by far.
    mean = float(torch.tensor([each.mean for each in many]).mean())
    assert (mean * (1 - mean) / 400) ** 0.5 < 0.7 * spread
