# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Streaks of routing that cannot be right, as findings of a run."""

from collections.abc import Sequence

import pytest

from nemo_rl_moe.routing.findings.routing_signal import (
    CLEAR_DIFFERING,
    CLEAR_LAYER,
    FLOAT32_FLIPS,
    FROZEN_LAYERS,
    LIVE_AGREEMENT,
    MISSING_RANK,
    MISSING_SHARE,
)
from nemo_rl_moe.routing.findings.tracker import FindingTracker, Thresholds

SUDDEN_ONLY = Thresholds(None, None, None, 1, sudden_steps=2)


def found_in(
    steps: Sequence[dict[str, float]], thresholds: Thresholds = SUDDEN_ONLY
) -> list[tuple[int, str, int, str]]:
    """Step, kind, first step and text of each finding when it begins."""
    tracker = FindingTracker(thresholds, None)
    return [
        (step, finding.kind, finding.first_step, finding.text)
        for step, metrics in enumerate(steps, 1)
        for finding in tracker.observe(step, metrics)
    ]


def test_agreement_that_drops_is_reported_after_two_steps() -> None:
    steady = [{LIVE_AGREEMENT: value} for value in (0.96, 0.961, 0.959, 0.96, 0.962)]
    ((step, kind, since, text),) = found_in([*steady, *[{LIVE_AGREEMENT: 0.9}] * 4])
    assert (step, kind, since) == (7, "low_agreement", 6)
    assert text.startswith("routers would choose the rollout's experts in 0.900 of the rows since step 6, and in")
    assert found_in([*steady, {LIVE_AGREEMENT: 0.9}, *steady]) == []


@pytest.mark.parametrize(
    ("sick", "kind", "words"),
    [
        ({FLOAT32_FLIPS: 0.003}, "float32_flips", "in 0.30% of the rows since step 3"),
        (
            {CLEAR_DIFFERING: 0.21, CLEAR_LAYER: 7.0},
            "clear_choices_differ",
            "layer 7 would choose other experts than the rollout in 21.0% of their clearest choices since step 3",
        ),
        ({MISSING_SHARE: 1.0, MISSING_RANK: 5.0}, "missing_rows", "data-parallel rank 5 has lacked 100% of"),
        ({FROZEN_LAYERS: 4.0}, "frozen_expert_bias", "the expert bias of 4 layers has not moved since step 3"),
    ],
)
def test_what_is_wrong_for_two_steps_is_reported(sick: dict[str, float], kind: str, words: str) -> None:
    ((step, found, since, text),) = found_in([{}, {}, sick, sick, sick])
    assert (step, found, since) == (4, kind, 3)
    assert words in text
    assert found_in([sick, {}, sick, {}]) == []
    assert found_in([sick] * 5, Thresholds(None, None, None, 1)) == []


def test_near_ties_in_float32_are_not_reported() -> None:
    assert found_in([{FLOAT32_FLIPS: 1e-4}] * 5) == []
