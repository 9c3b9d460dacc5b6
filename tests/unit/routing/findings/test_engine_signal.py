# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Findings of an engine without the weights, from gaps and versions over the steps."""

from collections.abc import Iterable

import numpy as np
import pytest

from nemo_rl_moe.routing.findings.engine_signal import GAP, VERSION, EngineSignal
from tests.support.quick_list import examples


def found(gaps: Iterable[float], versions: Iterable[float] | None = None) -> list[tuple[int, str, str]]:
    """Step, kind and text of each finding."""
    signal, values = EngineSignal(2), list(gaps)
    others: list[float | None] = [None] * len(values) if versions is None else list(versions)
    said = []
    for step, (gap, version) in enumerate(zip(values, others, strict=True), start=1):
        metrics = {GAP: gap} | ({} if version is None else {VERSION: version})
        said += [(step, kind, text) for kind, _, text in signal.observe(step, metrics)]
    return said


def test_a_gap_that_grows_with_the_distance_is_found() -> None:
    generator = np.random.default_rng(0)
    said = found(0.01 * (1 + 0.5 * step) * generator.uniform(0.97, 1.03) for step in range(12))
    assert (said[0][0], said[0][1]) == (10, "growing_gap")
    assert said[0][2].startswith("the log-prob gap has grown step by step from 0.01 at step 1")


def test_a_saw_tooth_is_told_from_growth() -> None:
    said = found(0.01 * (1 + step % 6) for step in range(18))
    assert [(step, kind) for step, kind, _ in said] == [(13, "resetting_gap")]
    assert said[0][2].startswith(
        "the log-prob gap rose from 0.01 to 0.06 over the steps 7 to 12, and was 0.01 again at step 13, as after the"
        " steps 1 to 6: a restart"
    )


def test_teeth_of_other_lengths_and_heights_behind_healthy_steps_are_found() -> None:
    teeth = [0.01 * height * (1 + step) for length, height in ((7, 1.0), (9, 2.0), (6, 0.8)) for step in range(length)]
    said = found([0.01, 0.012, 0.009, 0.011, *teeth, 0.01])
    # The healthy steps before the first tooth belong to it: its order is not clear.
    assert [(step, kind) for step, kind, _ in said] == [(27, "resetting_gap")]


@pytest.mark.parametrize("spread", [0.02, 0.2, 0.5, 1.0])
def test_healthy_gaps_have_no_finding(spread: float) -> None:
    generator = np.random.default_rng(1)
    for _ in range(examples(1000)):
        assert found(0.01 * np.exp(spread * generator.standard_normal(100))) == []


def test_a_slow_drift_to_twice_the_gap_is_no_finding() -> None:
    assert found(np.linspace(0.01, 0.02, 200)) == []


def test_a_version_that_stands_still_is_found() -> None:
    said = found([0.01] * 8, [1, 2, 3, 3, 3, 3, 3, 3])
    assert said[0] == (
        7,
        "pinned_engine",
        "the rollout's weight version has been 3 since step 3: the engine gets no weights",
    )


def test_versions_that_come_late_are_no_finding() -> None:
    assert found([0.01] * 12, [0, 0, 0, 1, 1, 2, 2, 2, 3, 5, 6, 7]) == []
