# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Fingerprints change when an input does, and not otherwise."""

import os
from pathlib import Path

import numpy as np
import pytest

from nemo_rl_moe.checkpoints.changes import changed_inputs, model_fingerprint, samples_fingerprint


@pytest.mark.parametrize(
    "others",
    [
        [[1, 2], [4]],
        [[1, 2, 3], [4]],
        [[1], [2, 4]],
        [[4], [1, 2]],
        [[1, 2], [4], []],
        [],
    ],
)
def test_samples(others: list[list[int]]) -> None:
    samples = [np.array([1, 2], dtype=np.int32), np.array([4], dtype=np.int32)]
    fingerprint = samples_fingerprint("data.jsonl", samples)
    assert fingerprint.startswith("data.jsonl: 2 samples, ")
    assert (samples_fingerprint("data.jsonl", others) == fingerprint) == (others == [[1, 2], [4]])


def test_a_model_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"12")
    checkpoint = tmp_path / "policy"
    checkpoint.mkdir()
    first = model_fingerprint(str(tmp_path))
    (tmp_path / "README.md").write_text("")
    os.utime(weights, ns=(10, 10))
    assert model_fingerprint(str(tmp_path)) == first, "a copy is the same"
    seen = {first}
    for change in (
        lambda: weights.write_bytes(b"13"),
        lambda: weights.write_bytes(b"1" * 3_000_000),
        lambda: weights.write_bytes(b"1" * 2_999_999 + b"2"),
        lambda: weights.write_bytes(b"3" + b"1" * 2_999_998 + b"2"),
        lambda: (tmp_path / "config.json").write_text("{ }"),
        lambda: (tmp_path / "model-2.safetensors").write_bytes(b""),
        lambda: (checkpoint / "__0_0.distcp").write_bytes(b"1"),
        lambda: (checkpoint / "__0_0.distcp").write_bytes(b"2"),
    ):
        change()
        seen.add(model_fingerprint(str(tmp_path)))
    assert len(seen) == 9
    assert model_fingerprint("Qwen/Qwen3-1.7B") == "Qwen/Qwen3-1.7B"


def test_a_change_is_reported_with_what_it_means() -> None:
    before = {"training data": "a.jsonl: 3 samples, 00", "model": "m", "gone": "x"}
    assert changed_inputs(before, before) == []
    (line,) = changed_inputs(before, {"training data": "a.jsonl: 4 samples, 11", "model": "m", "new": "y"})
    assert line.startswith("the training data has changed since the checkpoint (a.jsonl: 3 samples, 00 -> a.jsonl: 4")
    assert "twice or never" in line
