# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The scorecard of engines' failures: each fault of a made run is reported, and healthy steps are not."""

from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("fault", "most_steps"),
    [
        ("adapter_twice", 4),
        ("stale_prefixes", 6),
        ("sampling_mask", 1),
        ("unequal", 1),
        ("packed_indexer", 1),
        ("frozen_bias", 2),
        pytest.param("saw_tooth", 21, marks=pytest.mark.full),
        pytest.param("pinned_new_prompts", 20, marks=pytest.mark.full),
    ],
)
def test_a_fault_is_reported(
    fault: str, most_steps: int, repository_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(repository_root / "benchmarks"))
    from engine_faults import score_of

    found = score_of(fault, onset=6, seed=0)
    assert found.steps is not None
    assert found.steps <= most_steps
    assert found.false_alarms == ()


def test_healthy_steps_are_not(repository_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(repository_root / "benchmarks"))
    from engine_faults import healthy_lines

    assert healthy_lines(20, seed=0) == []
