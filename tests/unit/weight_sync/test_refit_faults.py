# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Right refits of tiny models of ten shapes, of which the check says nothing, and planted faults, which it names."""

from pathlib import Path

import pytest

from tests.support.gloo_ranks import run_ranks
from tests.support.quick_list import full, slow
from tests.support.refit_faults import (
    COARSE_FAULTS,
    FINE_FAULTS,
    STALE,
    TEN_SHAPES,
    TIMES,
    FaultRun,
    plant_faults,
    right_refits,
)


def faults_in(name: str, folder: Path, faults: list[str], precision: str, **more: object) -> FaultRun:
    (found,) = run_ranks(plant_faults, 1, name, str(folder), faults, precision, timeout_s=240, **more)
    return found


@pytest.mark.full
def test_every_fault_that_changes_a_number_is_found_in_sixteen_bits(tmp_path: Path) -> None:
    faults = [*COARSE_FAULTS, *FINE_FAULTS, STALE]
    found = faults_in("qwen3_moe", tmp_path, faults, "bfloat16")
    assert {fault: found.num_found(fault) for fault in faults} == found.num_changed
    always = [*COARSE_FAULTS, "one expert off by 1e-5", STALE]
    assert {fault: found.num_changed[fault] for fault in always} == dict.fromkeys(always, TIMES)
    # Numbers of bfloat16 are 0.4% apart and more: a factor of 1.001 is lost by rounding.
    assert found.num_changed["down_proj x 1.001"] == 0
    swapped = found.said["two experts swapped"][0] or ""
    assert "in copy 0 6 of 69 tensors differ: model.layers.0.mlp.experts.0.gate_proj.weight" in swapped
    assert "1 of 69 tensors differ: model.layers." in (found.said["a norm zeroed"][0] or "")
    assert "1 of 69 tensors differ: model.embed_tokens.weight" in (found.said["embedding off by 1e-3"][0] or "")


def test_every_fault_is_found_in_float32(tmp_path: Path) -> None:
    faults = [*FINE_FAULTS, STALE]
    found = faults_in("qwen3_moe", tmp_path, faults, "float32")
    assert {fault: found.num_found(fault) for fault in faults} == dict.fromkeys(faults, TIMES)


@pytest.mark.parametrize(
    ("name", "num_steps"), [("qwen3_moe", 3), *(slow(name, 19, id=f"{name}-20") for name in TEN_SHAPES)]
)
@pytest.mark.parametrize("learning_rate", [full(1e-6, id="small steps"), pytest.param(1e-3, id="large steps")])
def test_right_refits_raise_no_alarm(name: str, num_steps: int, learning_rate: float, tmp_path: Path) -> None:
    (found,) = run_ranks(right_refits, 1, [name], str(tmp_path), num_steps, learning_rate, timeout_s=280)
    refits = found[name]
    assert refits.alarms == []
    assert len(refits.gaps) == num_steps + 1
    assert refits.share_compared == 1
