# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Wrong and missing routes of rollouts, step by step."""

from collections.abc import Sequence
from typing import get_args

from nemo_rl_moe.routing.agreement.route_identity import AnomalyKind, RoutingAnomaly
from nemo_rl_moe.routing.findings.routing_signal import MISSING_METRIC, WRONG_ROUTES, WrongRoutesKind, wrong_routes
from nemo_rl_moe.routing.findings.tracker import QUIET_STEPS, Finding, FindingTracker, Thresholds

OFF = Thresholds(None, None, None, 1)
LATE = RoutingAnomaly("token", "routes are one token late")
OF_LAYER_2 = RoutingAnomaly("layer", "layer 3 carries layer 2's routes", 3)
OF_LAYER_4 = RoutingAnomaly("layer", "layer 5 carries layer 4's routes", 5)


def watch(
    captures: Sequence[Sequence[RoutingAnomaly] | None], *, steps_of_metrics: bool = True
) -> tuple[list[Finding], list[list[Finding]]]:
    """All findings at the end, and what the captures of the steps 1, 2, ... began; None: a step without a capture."""
    tracker = FindingTracker(OFF, 2)
    begun = []
    for step, anomalies in enumerate(captures, start=1):
        begun.append([] if anomalies is None else tracker.observe_anomalies(step, anomalies))
        if steps_of_metrics:
            assert tracker.observe(step, {"train/loss": 1.0}) == []
    return tracker.findings, begun


def test_each_kind_of_anomaly_is_a_kind_of_finding() -> None:
    assert set(WRONG_ROUTES) == set(get_args(AnomalyKind))
    assert set(WRONG_ROUTES.values()) == set(get_args(WrongRoutesKind))


def test_an_anomaly_is_reported_at_its_first_step_in_its_own_words() -> None:
    findings, begun = watch([[], [OF_LAYER_2], [OF_LAYER_2], []])
    assert [len(found) for found in begun] == [0, 1, 0, 0]
    (finding,) = findings
    assert (finding.kind, finding.layer) == ("routes_of_another_layer", 3)
    assert finding.text == "layer 3 carries layer 2's routes; since step 2"
    assert (finding.first_step, finding.last_step, finding.is_over) == (2, 3, True)


def test_layers_are_findings_of_their_own_and_other_anomalies_of_a_kind_are_one() -> None:
    swapped = [RoutingAnomaly("sequence", f"sequence {number} is not its own") for number in range(4)]
    found = list(wrong_routes([OF_LAYER_2, *swapped, OF_LAYER_4]))
    assert [(kind, layer) for kind, layer, _ in found] == [
        ("routes_of_another_layer", 3),
        ("routes_of_another_sequence", None),
        ("routes_of_another_layer", 5),
    ]
    assert found[1][2] == "sequence 0 is not its own; sequence 1 is not its own; and 2 more like it"


def test_what_comes_back_is_the_same_episode() -> None:
    """Few sequences of a step are looked at: a fault of one engine of several is not seen each time."""
    (finding,), begun = watch([[LATE], [], [], [LATE], [LATE]])
    assert [len(found) for found in begun] == [1, 0, 0, 0, 0]
    assert (finding.first_step, finding.last_step, finding.is_over) == (1, 5, False)
    assert finding.text.endswith("; since step 1")
    findings, _ = watch([[LATE], *[[]] * (QUIET_STEPS + 1), [LATE]])
    assert [finding.first_step for finding in findings] == [1, QUIET_STEPS + 3]


def test_neither_a_step_without_a_capture_nor_other_findings_end_it() -> None:
    for steps_of_metrics in (True, False):
        (finding,), _ = watch([[LATE], None, None], steps_of_metrics=steps_of_metrics)
        assert not finding.is_over


def test_a_capture_ends_no_other_finding() -> None:
    tracker = FindingTracker(OFF, 2)
    tracker.observe(1, {"train/skipped_updates": 1.0})
    tracker.observe_anomalies(2, [])
    (finding,) = tracker.findings
    assert not finding.is_over


def missing(shares: Sequence[float | None], limit: float | None = 0.001, steps: int = 3) -> list[list[Finding]]:
    tracker = FindingTracker(
        Thresholds(None, None, None, 1, missing_routes_share=limit, missing_routes_steps=steps), None
    )
    return [
        tracker.observe(step, {} if share is None else {MISSING_METRIC: share})
        for step, share in enumerate(shares, start=1)
    ]


def test_missing_routes_are_reported_when_they_last() -> None:
    begun = missing([0.0, 0.5, 0.0, 0.002, 0.5, 0.25, 0.25])
    assert [len(found) for found in begun] == [0, 0, 0, 0, 0, 1, 0]
    (finding,) = begun[5]
    assert (finding.kind, finding.first_step) == ("missing_routes", 4)
    assert finding.text.startswith("25% of the routes of rollouts are missing, and some have been since step 4: ")


def test_few_missing_routes_and_those_that_nobody_asked_for_are_none() -> None:
    assert not any(missing([0.001] * 9))
    assert not any(missing([0.5] * 9, limit=None))
    assert not any(missing([None] * 9))
