# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""How long a run is and when it validates, whatever the algorithm."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_moe.algorithms.step_recorder import RunSummary, num_training_steps, validation_is_due
from nemo_rl_moe.checkpoints.state import LoopState


@dataclass(frozen=True)
class Schedule:
    max_num_epochs: int = 1
    max_num_steps: int | None = None
    val_period: int = 0
    val_at_start: bool = False
    val_at_end: bool = False


@pytest.mark.parametrize(
    ("epochs", "max_steps", "expected"),
    [(1, None, 3), (4, None, 12), (4, 5, 5), (1, 5, 3), (2, 6, 6), (1, 1, 1)],
)
def test_number_of_steps(epochs: int, max_steps: int | None, expected: int) -> None:
    assert num_training_steps(Schedule(epochs, max_steps), steps_per_epoch=3) == expected


@given(period=st.integers(0, 9), at_end=st.booleans(), num_steps=st.integers(1, 12))
def test_when_a_validation_is_due(period: int, at_end: bool, num_steps: int) -> None:
    config = Schedule(val_period=period, val_at_end=at_end)
    found = {step for step in range(1, num_steps + 1) if validation_is_due(config, step, num_steps)}
    expected = set(range(period, num_steps + 1, period)) if period else set()
    assert found == expected | ({num_steps} if at_end else set())


def test_summary_of_where_a_run_stands() -> None:
    state = LoopState(
        step=4,
        first_validation={"val/accuracy": 0.1},
        last_validation={"val/accuracy": 0.3},
        last_training={"train/loss": 2.0},
    )
    expected = RunSummary(4, state.first_validation, state.last_validation, state.last_training, "SIGINT")
    assert RunSummary.of(state, "SIGINT") == expected
    assert RunSummary.of(LoopState(), None) == RunSummary(0, {}, {}, {}, None)
