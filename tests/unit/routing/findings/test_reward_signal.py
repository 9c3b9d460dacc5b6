# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Reward functions that do not work are findings: responses without a score, and rewards that never vary."""

import math
from collections.abc import Iterable, Mapping, Sequence

from nemo_rl_moe.routing.findings.reward_signal import FailedResponses
from nemo_rl_moe.routing.findings.tracker import QUIET_STEPS, Finding, FindingTracker, Thresholds

LIMITS = Thresholds(None, None, None, 1, idle_steps=3, failed_responses_share=0.01)
CAUSE = "ValueError: even (sample grpo.jsonl:3)"


def failed(number: int, responses: int = 16, split: str = "train", first: str = CAUSE) -> FailedResponses:
    return FailedResponses(split, number, responses, first)


def rewards(mean: float, deviation: float = 0.0, **named: tuple[float, float]) -> dict[str, float]:
    metrics = {"train/reward": mean, "train/reward_std": deviation}
    for name, (value, spread) in named.items():
        metrics |= {f"train/rewards/{name}/mean": value, f"train/rewards/{name}/std": spread}
    return metrics


def found_in(
    steps: Iterable[Mapping[str, float]], first: int = 1, limits: Thresholds = LIMITS
) -> tuple[list[Finding], list[int]]:
    """All findings, and the steps that begin one."""
    tracker = FindingTracker(limits, None)
    begun = [step for step, metrics in enumerate(steps, start=first) if tracker.observe(step, metrics)]
    return tracker.findings, begun


def found_of_failures(
    by_step: Mapping[int, Sequence[FailedResponses]], limits: Thresholds = LIMITS
) -> tuple[list[Finding], list[int]]:
    tracker = FindingTracker(limits, None)
    steps = range(max(by_step) + 2)
    begun = [step for step in steps if tracker.observe(step, {"train/loss": 1.0}, failed=by_step.get(step, ()))]
    return tracker.findings, begun


def test_failures_are_a_finding_at_once_with_their_share_and_the_first_cause() -> None:
    later = failed(8, first="KeyError: 'anwser' (sample grpo.jsonl:9)")
    (finding,), begun = found_of_failures({2: [failed(6)], 3: [later], 5: [later]})
    assert begun == [2]
    assert (finding.kind, finding.first_step, finding.last_step, finding.is_over) == ("failed_responses", 2, 5, True)
    assert finding.text == f"8 of 16 responses (50%) could not be scored at step 5; the first at step 2: {CAUSE}"


def test_failures_of_validations_count_too() -> None:
    (finding,), begun = found_of_failures({0: [failed(3, 64, "val")]})
    assert begun == [0]
    assert finding.text == (f"3 of 64 responses of the validation (5%) could not be scored at step 0: {CAUSE}")


def test_a_failure_among_many_is_none_and_one_that_comes_back_late_begins_anew() -> None:
    assert found_of_failures({1: [failed(1, 100)]}) == ([], [])
    late = 2 + QUIET_STEPS + 5
    findings, begun = found_of_failures({2: [failed(6)], late: [failed(6, first="another")]})
    assert begun == [2, late]
    assert findings[1].text.endswith(f"could not be scored at step {late}: another")
    assert found_of_failures({1: [failed(16)]}, Thresholds(None, None, None, 1, idle_steps=3)) == ([], [])


def test_a_named_reward_that_never_varies_is_named_with_its_value() -> None:
    steps = [rewards(0.2 * step, 0.4, format=(0.0, 0.0), right=(0.2 * step, 0.4)) for step in range(1, 6)]
    (finding,), begun = found_in(steps)
    assert begun == [3]
    assert (finding.kind, finding.first_step, finding.is_over) == ("constant_reward", 1, False)
    assert finding.text == (
        "the reward 'format' has been 0 in every response since step 1: it distinguishes no responses"
    )


def test_several_are_one_finding() -> None:
    (finding,), _ = found_in([rewards(1.5, 0.5, format=(0.0, 0.0), length=(-0.25, 0.0))] * 4)
    assert finding.text == (
        "the reward 'format' has been 0, the reward 'length' has been -0.25 in every response since step 1: it"
        " distinguishes no responses"
    )


def test_a_reward_that_has_varied_once_is_none() -> None:
    """A form that every response has learned is worth the same everywhere, and that is as it should be."""
    varied = rewards(0.5, 0.1, format=(0.5, 0.5))
    assert found_in([varied, *[rewards(1.0, 0.1, format=(1.0, 0.0))] * 20]) == ([], [])
    between_steps = [rewards(0.5, 0.1, format=(float(step), 0.0)) for step in range(20)]
    assert found_in(between_steps) == ([], [])
    assert found_in([rewards(0.5, 0.1, format=(math.nan, math.nan))] * 9) == ([], [])


def test_rounding_is_no_variation() -> None:
    third = 1 / 3
    steps = [rewards(0.5, 0.1, format=(third + step * 1e-17, 5e-17)) for step in range(4)]
    (finding,), _ = found_in(steps)
    assert "the reward 'format' has been 0.3333 in" in finding.text


def test_the_whole_reward_is_reported_where_its_advantages_are_not() -> None:
    """By an estimator without a baseline, equal rewards have advantages."""
    (finding,), _ = found_in([rewards(1.0) | {"train/advantages/min": 1.0, "train/advantages/max": 1.0}] * 4)
    assert finding.text == "the reward has been 1 in every response since step 1: it distinguishes no responses"
    (finding,), _ = found_in([rewards(0.0) | {"train/advantages/min": 0.0, "train/advantages/max": 0.0}] * 4)
    assert finding.kind == "no_advantages"
    assert "rewards that are compared are equal (all 0), and teach nothing" in finding.text


def test_of_a_run_that_goes_on_without_its_beginning_nothing_is_known() -> None:
    assert found_in([rewards(0.5, 0.1, format=(1.0, 0.0))] * 9, first=40) == ([], [])


def test_a_step_without_any_score_does_not_end_it() -> None:
    constant = rewards(0.5, 0.1, format=(0.0, 0.0))
    (finding,), begun = found_in([constant, {"train/loss": 0.0}, constant, constant])
    assert begun == [4]
    assert not finding.is_over


def test_none_without_a_threshold() -> None:
    without = Thresholds(None, None, None, 1)
    assert found_in([rewards(1.0, format=(0.0, 0.0))] * 9, limits=without) == ([], [])
