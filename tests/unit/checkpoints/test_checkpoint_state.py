# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""`state.json`: what is written comes back to the last bit; anything else is refused with its field."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from nemo_rl_moe.checkpoints.state import LoopState, json_ready, read_state, write_state
from nemo_rl_moe.errors import CheckpointError
from tests.support.saving_runs import Run


@pytest.fixture
def saved(make_run: Callable[..., Run]) -> Path:
    """A checkpoint's folder."""
    run = make_run()
    run.save(3, {"val/accuracy": 0.1 + 0.2}, first_validation={"val/loss": math.inf}, last_training={"x": math.nan})
    return run.newest().folder


def changed(folder: Path, change: Callable[[dict[str, Any]], None]) -> list[str]:
    """The lines that the state is refused with after a change."""
    path = folder / "state.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError) as caught:
        read_state(folder)
    assert caught.value.exit_code == 2
    return caught.value.problems


def test_what_is_written_comes_back(saved: Path, tmp_path: Path) -> None:
    state = read_state(saved)
    assert (state.loop.step, state.loop.batches_taken, state.metric_value) == (3, 3, 0.1 + 0.2)
    assert state.loop.first_validation == {"val/loss": math.inf}
    assert math.isnan(state.loop.last_training["x"])
    assert state.versions == {"python": "3", "packages": {"ray": None}}
    json.loads((saved / "state.json").read_text(), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    write_state(tmp_path, state)
    assert (tmp_path / "state.json").read_bytes() == (saved / "state.json").read_bytes()


@given(st.dictionaries(st.text(min_size=1, max_size=8), st.floats()), st.integers(0, 2**40))
def test_loop_states_come_back_to_the_last_bit(metrics: dict[str, float], step: int) -> None:
    loop = LoopState(step=step, batches_taken=step, last_training=metrics, skipped_in_a_row=2)
    again = TypeAdapter(LoopState).validate_json(json.dumps(json_ready(vars(loop)), allow_nan=False))
    assert again.last_training.keys() == metrics.keys()
    assert all(_same(again.last_training[key], value) for key, value in metrics.items())
    assert (again.step, again.skipped_in_a_row) == (step, 2)


def _same(left: float, right: float) -> bool:
    return left.hex() == right.hex()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda state: state.pop("run_id"), "run_id: Field required"),
        (lambda state: state.update(run_id=7), "run_id: Input should be a valid string"),
        (lambda state: state.update(wibble=1), "wibble: Extra inputs are not permitted"),
        (lambda state: state.update(format_version=2), "format_version: Input should be 1"),
        (lambda state: state.update(format_version="1"), "format_version: Input should be 1"),
        (lambda state: state.update(with_optimizer=1), "with_optimizer: Input should be a valid boolean"),
        (lambda state: state.update(metric_value="0.5"), "metric_value: Input should be a valid number"),
        (lambda state: state.update(time="NaN"), "time: Input should be a valid number"),
        (lambda state: state["loop"].update(step="3"), "loop.step: Input should be a valid integer"),
        (lambda state: state["loop"].update(step=True), "loop.step: Input should be a valid integer"),
        (lambda state: state["loop"].update(step=-1), "loop.step: Input should be greater than or equal to 0"),
        (lambda state: state["loop"].update(last_training={"a": [1]}), "loop.last_training.a: Input should be"),
        (lambda state: state.update(logger_run_ids={"wandb": 3}), "logger_run_ids.wandb: Input should be"),
    ],
)
def test_a_wrong_field_is_named(saved: Path, change: Callable[[dict[str, Any]], None], field: str) -> None:
    (problem,) = changed(saved, change)
    assert problem.startswith(f"{saved}/state.json: {field}")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not valid JSON"),
        (b'{"format_version": 1,', "not valid JSON"),
        (b"\x80\x04\x95", "not valid JSON"),
        (b"[]", "all of it: Input should be"),
        (b'"step"', "all of it: Input should be"),
    ],
)
def test_what_is_no_state_is_refused(saved: Path, content: bytes, reason: str) -> None:
    (saved / "state.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=reason):
        read_state(saved)
