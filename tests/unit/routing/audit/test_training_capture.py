# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""`--training` with a folder of captured routes, as the hooks write it in the training loop."""

import json
from pathlib import Path

import pytest

from nemo_rl_moe.cli import main
from nemo_rl_moe.routing.audit.adapters.router_shape import read_router_shape
from nemo_rl_moe.routing.audit.sources import open_source
from nemo_rl_moe.runs.folder.capture_folder import CaptureFolderWriter
from nemo_rl_moe.runs.folder.captured_sequences import CaptureDescription, CapturedSequence
from tests.conftest import REPOSITORY_ROOT

EXAMPLES = REPOSITORY_ROOT / "examples" / "audit"
MODEL, LOGITS = EXAMPLES / "model", EXAMPLES / "transformers"
_COLUMNS = ("token_ids", "training_experts", "training_logprobs", "margins")


def captured(folder: Path, *, layers: tuple[int, ...] = (1, 2, 3)) -> Path:
    """Write what routers of training chose for the tokens of the examples, two sequences a file."""
    source = open_source(LOGITS, "auto", read_router_shape(MODEL), None, None)
    assert source.sequences is not None
    sequences = [sequence for part in source.sequences[3]() for sequence in part]
    writer = CaptureFolderWriter(folder, CaptureDescription(layers, 8, 2, "hooks"))
    for first in range(0, len(sequences), 2):
        writer.write(3, [_with_columns(sequence) for sequence in sequences[first : first + 2]])
    return folder


def _with_columns(sequence: CapturedSequence) -> CapturedSequence:
    kept = {name: sequence.columns[name] for name in _COLUMNS if name in sequence.columns}
    return CapturedSequence(sequence.name, sequence.num_tokens, kept, 0.5)


def audited(path: Path, training: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    assert main(["audit", str(path), "--model", str(MODEL), "--training", str(training), "--json", "-"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    return dict(found)


@pytest.mark.parametrize("below", ["", "capture"])
@pytest.mark.parametrize("folder", ["verl", "slime", "vllm"])
def test_captured_routes_are_the_trainings_side(
    folder: str, below: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    captured(tmp_path / below)  # a capture folder, or the folder of a run that holds one
    path = EXAMPLES / folder / "healthy"
    found, expected = (audited(path, training, capsys) for training in (tmp_path, LOGITS))
    assert found["steps"] == expected["steps"]
    assert found["notices"] == []


def test_a_fault_is_found_with_captured_routes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = EXAMPLES / "verl" / "one_token_late"
    assert main(["audit", str(path), "--model", str(MODEL), "--training", str(captured(tmp_path))]) == 1
    assert "step 3: routes are one token late" in capsys.readouterr().err


def test_routes_of_other_layers_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training = captured(tmp_path, layers=(0, 1, 2))
    assert main(["audit", str(EXAMPLES / "verl" / "healthy"), "--model", str(MODEL), "--training", str(training)]) == 2
    assert capsys.readouterr().err == (
        f"error: --training {training}: has routes of the layers 0, 1, 2, expected 1, 2, 3 as --model says\n"
    )


@pytest.mark.parametrize("arguments", [["capture"], ["verl"], ["--format", "capture", "capture"]])
def test_a_format_given_as_a_path_is_reported(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    captured(tmp_path / "routes")
    assert main(["audit", *arguments, "routes"]) == 2
    assert f"; for a format: --format {arguments[-1]}" in capsys.readouterr().err
