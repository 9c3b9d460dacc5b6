# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What a run measures, as a capture folder: the audit has the numbers that the run logs."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nemo_rl_moe.algorithms.capture_writer import CaptureWriter, MeasuredPass, captured_rows
from nemo_rl_moe.cli import main
from nemo_rl_moe.distributed.batch import StoredColumn, TokenBatch
from nemo_rl_moe.distributed.stored_rows import StoredRows
from nemo_rl_moe.rollouts.training_batch import training_batch
from nemo_rl_moe.rollouts.trajectory import TokenSequence, Trajectory
from nemo_rl_moe.routing.metrics.mismatch_split import gap_metrics, split_gap, split_metrics
from nemo_rl_moe.routing.replay import ROUTED_EXPERTS, UNKNOWN
from nemo_rl_moe.runs.folder.capture_folder import CAPTURE_FOLDER, read_description, read_step, steps_of
from nemo_rl_moe.runs.loggers.rewind import rewind_run_folder

LENGTHS, NUM_LAYERS, NUM_EXPERTS, TOPK = (30, 41, 25, 37), 2, 8, 2
MOE = {"moe_layer_freq": [0, 1, 1], "num_moe_experts": NUM_EXPERTS}
GENERATOR = np.random.default_rng(2)


def routes(length: int) -> np.ndarray:
    return GENERATOR.random((length, NUM_LAYERS, NUM_EXPERTS)).argsort(-1)[..., :TOPK].astype(np.int16)


def stored(rows: Sequence[np.ndarray]) -> StoredColumn:
    return StoredColumn(tuple(map(StoredRows.of, rows)), (NUM_LAYERS, TOPK), "int16", fill=UNKNOWN)


def trajectory(number: int, length: int, experts: np.ndarray) -> Trajectory:
    mask = np.arange(length) >= 9
    sequence = TokenSequence(
        token_ids=GENERATOR.integers(100, size=length),
        loss_mask=mask,
        logprobs=np.where(mask, -GENERATOR.random(length), 0).astype(np.float32),
        weight_versions=np.where(mask, 3, -1),
        routed_experts=StoredRows.of(experts),
    )
    return Trajectory(
        sample_id=f"line {number}",
        group_id="0",
        sequences=(sequence,),
        reward=float(number),
        is_correct=False,
        finish_reason="stop",
    )


def near(values: torch.Tensor) -> torch.Tensor:
    return values + torch.from_numpy(0.01 * GENERATOR.standard_normal(values.shape)).float()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TokenBatch, dict[str, torch.Tensor]]:
    """A run's folder with two steps, the batch, and what each pass gave; two of four sequences were repeated."""
    live = [routes(length) for length in LENGTHS]
    rollout = [rows[:-1].copy() for rows in live]
    rollout[0][4] = rollout[0][4][..., ::-1]  # the order says nothing
    rollout[1][:8, 1] = (rollout[1][:8, 1] + 1) % NUM_EXPERTS
    made = [trajectory(n, length, rows) for n, (length, rows) in enumerate(zip(LENGTHS, rollout, strict=True))]
    batch = training_batch(made, torch.tensor([[1.0, -1.0, 0.5, -0.5]]), 0, leave_out_truncated=False)
    passes = {"own": near(batch.columns["generation_logprobs"].values)}
    passes |= {"replayed": near(passes["own"]), "again": near(passes["own"][:2, :41])}
    folder = tmp_path_factory.mktemp("run")
    recorder = CaptureWriter(folder / CAPTURE_FOLDER, MOE, pytest.fail, list)
    for step in (5, 10):
        own, again = MeasuredPass(passes["own"], stored(live)), MeasuredPass(passes["again"], stored(live[:2]))
        recorder.write(step, batch, captured_rows(made), own, passes["replayed"], again)
    return folder, batch, passes


def audited(folder: Path) -> dict[str, Any]:
    output = folder / "audit.json"
    assert main(["audit", str(folder), "--json", str(output)]) == 0
    (run,) = json.loads(output.read_text())
    found: dict[str, Any] = run
    return found


def test_the_audit_of_a_run_s_folder_has_its_numbers(
    recorded: tuple[Path, TokenBatch, dict[str, torch.Tensor]],
) -> None:
    folder, batch, passes = recorded
    description = read_description(folder / CAPTURE_FOLDER)
    assert (description.layers, description.num_experts, description.topk) == ((1, 2), NUM_EXPERTS, TOPK)
    run = audited(folder)
    assert [step["step"] for step in run["steps"]] == [5, 10]
    metrics = run["steps"][1]["metrics"]
    mask = batch.token_mask[:, 1:]
    generation = batch.columns["generation_logprobs"].values
    parts = [values[:, 1:][mask].double().numpy() for values in (generation, passes["replayed"], passes["own"])]
    expected = split_metrics(split_gap(*parts)) | {"tokens": float(mask.sum())}
    found = {key.removeprefix("moe/routing_split/"): value for key, value in metrics.items() if "routing_split" in key}
    assert found == pytest.approx(expected, rel=1e-12)
    of_part = mask[:2, :40]
    gap = gap_metrics((passes["again"] - passes["own"][:2])[:, 1:][of_part].double().numpy())
    assert metrics["moe/routing_noise/mean_abs_trainer"] == pytest.approx(gap["mean_abs"], rel=1e-6)
    assert metrics["moe/routing_noise/rows_differing_trainer"] == 0
    rows = NUM_LAYERS * (sum(LENGTHS) - len(LENGTHS))
    assert metrics["moe/routing/rows_expected"] == rows
    assert metrics["moe/routing/live_agreement"] == pytest.approx(1 - 8 / rows, abs=2.1 / rows)
    assert (metrics["reward"], metrics["advantages/min"], metrics["advantages/max"]) == (1.5, -1.0, 1.0)


@pytest.mark.parametrize(("is_frozen", "code"), [(True, 1), (False, 0)])
def test_the_biases_of_a_run_reach_the_audit(is_frozen: bool, code: int, tmp_path: Path) -> None:
    """A step before any update, one whose update was skipped, and steps of every tenth update."""
    recorder = CaptureWriter(tmp_path / CAPTURE_FOLDER, MOE, pytest.fail, list)
    live = [routes(length) for length in LENGTHS]
    made = [trajectory(n, length, rows[:-1]) for n, (length, rows) in enumerate(zip(LENGTHS, live, strict=True))]
    batch = training_batch(made, torch.tensor([[1.0, -1.0, 0.5, -0.5]]), 0, leave_out_truncated=False)
    logprobs = near(batch.columns["generation_logprobs"].values)
    own, again = MeasuredPass(logprobs, stored(live)), MeasuredPass(logprobs[:2, :41])
    now = np.zeros((NUM_LAYERS, NUM_EXPERTS), dtype=np.float32)  # after ten updates as before them
    before = now.copy()
    before[1] -= 0 if is_frozen else 0.001
    before[0] += 0.001
    for step, biases in ((1, None), (10, None), (20, np.stack([before, now])), (30, np.stack([before, now]))):
        recorder.write(step, batch, captured_rows(made), own, None, again, biases)
    description, files = read_description(tmp_path / CAPTURE_FOLDER), steps_of(tmp_path / CAPTURE_FOLDER)
    for step, known in ((10, None), (20, now)):
        (rows, _) = (next(read_step(description, step, [file])) for file in files[step])
        np.testing.assert_array_equal(rows.expert_bias, known)
        np.testing.assert_array_equal(rows.expert_bias_before, None if known is None else before)
    output = tmp_path / "audit.json"
    assert main(["audit", str(tmp_path), "--json", str(output)]) == code
    (run,) = json.loads(output.read_text())
    said = [finding["text"] for finding in run["findings"]]
    text = "the expert bias of 1 layers has not moved since step 20"
    assert [text in line for line in said] == [True] * is_frozen


def test_a_run_that_is_resumed_writes_its_steps_again(
    recorded: tuple[Path, TokenBatch, dict[str, torch.Tensor]],
) -> None:
    folder = recorded[0]
    (folder / CAPTURE_FOLDER / "notes.txt").write_text("of somebody else")
    rewind_run_folder(folder, 7)
    assert list(steps_of(folder / CAPTURE_FOLDER)) == [5]
    assert (folder / CAPTURE_FOLDER / "notes.txt").exists()
    assert ROUTED_EXPERTS in recorded[1].stored


def test_a_capture_that_cannot_be_written_stops_no_run(
    recorded: tuple[Path, TokenBatch, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    _, batch, passes = recorded
    (tmp_path / "capture").write_text("a file where the folder should be")
    reported: list[str] = []
    recorder = CaptureWriter(tmp_path / "capture", MOE, reported.append, list)
    made = [trajectory(n, length, routes(length)[:-1]) for n, length in enumerate(LENGTHS)]
    own = MeasuredPass(passes["own"], stored([routes(length) for length in LENGTHS]))
    for step in (1, 2):
        recorder.write(step, batch, captured_rows(made), own, None, MeasuredPass(passes["again"]))
    (line,) = reported
    assert "cannot be written, no further capture is saved" in line


@pytest.mark.parametrize("shift", [0, 3])
def test_positions_of_indexers_are_audited(shift: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    length = LENGTHS[0]
    experts = routes(length)
    positions = np.full((length - 1, 1, 4), UNKNOWN, dtype=np.int32)
    for token, row in enumerate(positions):
        count = min(token + 1, 4)
        row[0, :count] = np.sort(GENERATOR.permutation(token + 1)[:count]) + shift
    made = trajectory(0, length, experts[:-1])
    made = replace(made, sequences=(replace(made.sequences[0], indexer_positions=StoredRows.of(positions)),))
    batch = training_batch([made], torch.ones(1, 1), 0, leave_out_truncated=False)
    own = MeasuredPass(near(batch.columns["generation_logprobs"].values), stored([experts]))
    recorder = CaptureWriter(tmp_path / CAPTURE_FOLDER, MOE, pytest.fail, list)
    recorder.write(1, batch, captured_rows([made]), own, None, own)
    assert read_description(tmp_path / CAPTURE_FOLDER).indexer_shape == (1, 4)
    main(["audit", str(tmp_path / CAPTURE_FOLDER)])
    found = capsys.readouterr().err
    assert ("they count from the batch's start" in found) == ("of the indexer" in found) == bool(shift)
