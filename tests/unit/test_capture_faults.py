# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The scorecard through files: faults planted into capture folders are found by the audit, and nothing before them."""

import re
from pathlib import Path

import numpy as np
import pytest

from nemo_rl_moe.runs.folder.capture_folder import CaptureFolderWriter
from nemo_rl_moe.runs.folder.captured_sequences import CaptureDescription, CapturedSequence

NUM_LAYERS, NUM_EXPERTS, TOPK = 4, 8, 2


@pytest.fixture(autouse=True)
def benchmarks(repository_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of the module `capture_faults`."""
    monkeypatch.syspath_prepend(str(repository_root / "benchmarks"))


@pytest.fixture(scope="module")
def capture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight healthy steps of sixteen sequences, in which one row in a hundred differs."""
    folder = tmp_path_factory.mktemp("capture")
    writer = CaptureFolderWriter(folder, CaptureDescription(tuple(range(NUM_LAYERS)), NUM_EXPERTS, TOPK))
    generator = np.random.default_rng(4)
    for step in range(1, 9):
        sequences = []
        for number in range(16):
            live = generator.random((60, NUM_LAYERS, NUM_EXPERTS)).argsort(-1)[..., :TOPK].astype(np.int16)
            rollout = live[:-1].copy()
            differs = generator.random(rollout.shape[:2]) < 0.01
            rollout[differs] = generator.random((int(differs.sum()), NUM_EXPERTS)).argsort(-1)[:, :TOPK]
            columns = {"rollout_experts": rollout, "training_experts": live}
            sequences.append(CapturedSequence(f"s{number}", 60, columns))
        writer.write(step, sequences)
    return folder


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten healthy steps of the same prompts, by weights that move a little from step to step."""
    folder = tmp_path_factory.mktemp("conversations")
    writer = CaptureFolderWriter(folder, CaptureDescription(tuple(range(NUM_LAYERS)), NUM_EXPERTS, TOPK))
    generator = np.random.default_rng(4)
    shape = (16, 60, NUM_LAYERS, NUM_EXPERTS)
    first, direction = generator.standard_normal(shape), generator.standard_normal(shape)
    for step in range(1, 11):
        live = (first + 0.05 * step * direction).argsort(-1)[..., -TOPK:].astype(np.int16)
        sequences = []
        for number, routes in enumerate(live):
            logprobs = -generator.random(60).astype(np.float32)
            rounding = generator.normal(0, 1e-3, 60).astype(np.float32)
            columns = {"rollout_experts": routes[:-1], "training_experts": routes}
            ids = np.concatenate([[number], np.arange(1, 60) + 100 * number])  # every other sum is even
            columns |= {"token_ids": ids, "loss_mask": np.arange(60) >= 20}
            columns |= {"rollout_logprobs": logprobs + rounding, "training_logprobs": logprobs}
            sequences.append(CapturedSequence(f"s{number}", 60, columns))
        writer.write(step, sequences)
    return folder


@pytest.mark.parametrize(
    ("made", "fault", "turns", "text", "steps"),
    [
        ("capture", "token_shift", 6, "^routes are one token late", 1),
        ("capture", "dropped_rank", 6, "^the writer rank-1 has lacked 100%", 2),
        ("conversations", "turn_ends", 3, "the last token of 8 of 8 turns carries filler routes", 1),
        ("conversations", "lost_path", 3, "8 of 8 sequences of 2 turns have no routes", 1),
        ("conversations", "stale_prefixes", 3, "the engine's routes of prefixes have stood still", 2),
    ],
)
def test_a_planted_fault_is_found_in_files(
    made: str, fault: str, turns: int, text: str, steps: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    from capture_faults import score_of_files

    found = score_of_files(request.getfixturevalue(made), fault, turns, tmp_path / "faulty")
    assert re.search(text, found.reported)
    assert (found.steps, found.false_alarms) == (steps, ())


def test_simulated_healthy_steps_have_no_finding(conversations: Path) -> None:
    from capture_faults import simulated_alarms

    assert simulated_alarms([conversations], 20, seed=0) == []
