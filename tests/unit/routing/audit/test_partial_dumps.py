# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Folders with files that cannot be read, and dumps in layouts that have no example file: AReaL's, miles' Parquet."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from nemo_rl_moe.cli import main
from nemo_rl_moe.routing.audit.adapters.layout import array
from nemo_rl_moe.routing.audit.adapters.registry import load, recognised
from nemo_rl_moe.routing.audit.adapters.router_shape import read_router_shape
from nemo_rl_moe.routing.audit.sources import open_source
from nemo_rl_moe.runs.folder.captured_sequences import CapturedSequence
from tests.conftest import REPOSITORY_ROOT

EXAMPLES = REPOSITORY_ROOT / "examples" / "audit"
MODEL = EXAMPLES / "model"
SLIME, MILES = (next((EXAMPLES / name / "healthy").rglob("*.pt")) for name in ("slime", "miles"))


def sequences_in(path: Path) -> list[CapturedSequence]:
    source = open_source(path, "auto", read_router_shape(MODEL), None, None)
    assert source.sequences is not None
    return [sequence for read in source.sequences.values() for part in read() for sequence in part]


@pytest.fixture
def samples() -> list[dict[str, Any]]:
    """Samples of a dump of miles."""
    found = [dict(sample) for sample in load(MILES)["samples"]]
    for sample in found:
        sample["rollout_routed_experts"] = array(sample["rollout_routed_experts"], "samples")
    return found


def test_what_can_be_read_is_audited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = SLIME.read_bytes()
    (tmp_path / "3.pt").write_bytes(whole)
    (tmp_path / "4.pt").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "5.pt").write_bytes(b"")
    shutil.copy(EXAMPLES / "transformers_torch" / "3.pt", tmp_path / "6.pt")
    (tmp_path / "notes.json").write_text("{}", encoding="utf-8")
    assert main(["audit", str(tmp_path), "--model", str(MODEL), "--json", "-"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert [step["step"] for step in found["steps"]] == [3]
    unread = [notice for notice in found["notices"] if notice.startswith("not read: ")]
    assert [Path(notice.removeprefix("not read: ").split(":")[0]).name for notice in unread] == ["4.pt", "5.pt", "6.pt"]


def test_the_first_file_may_be_half_written(tmp_path: Path) -> None:
    (tmp_path / "1.pt").write_bytes(SLIME.read_bytes()[:1000])
    shutil.copy(SLIME, tmp_path / "3.pt")
    assert main(["audit", str(tmp_path), "--model", str(MODEL)]) == 0


def test_training_without_a_partner_for_a_step_that_cannot_be_read_is_no_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(EXAMPLES / "vllm" / "healthy" / "3.jsonl", tmp_path)
    (tmp_path / "4.jsonl").write_text('{"half')
    words = ["--training", str(EXAMPLES / "verl" / "healthy"), "--model", str(MODEL)]
    assert main(["audit", str(tmp_path), *words]) == 0
    assert "4.jsonl" in capsys.readouterr().out


def test_nothing_that_can_be_read_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "1.pt").write_bytes(b"PK\x03\x04")
    (tmp_path / "2.pt").write_bytes(b"")
    assert main(["audit", str(tmp_path)]) == 2
    assert "1.pt" in capsys.readouterr().err


def test_a_damaged_file_of_a_capture_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(EXAMPLES / "faults" / "healthy", tmp_path / "capture")
    path = tmp_path / "capture" / "step-00000004.rank0-0.parquet"
    path.write_bytes(path.read_bytes()[:500])
    assert main(["audit", str(tmp_path / "capture")]) == 0
    assert f"note: not read: {path}" in capsys.readouterr().out


def test_lines_of_json_that_are_whole_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (EXAMPLES / "vllm" / "healthy" / "3.jsonl").read_text(encoding="utf-8")
    file = tmp_path / "3.jsonl"
    file.write_text(text.rstrip()[:-200], encoding="utf-8")  # the last line is being written
    assert main(["audit", str(tmp_path), "--model", str(MODEL), "--json", "-"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["steps"][0]["num_sequences"] == len(text.splitlines()) - 1
    assert f"not read: {file}: 1 line, the last of them {len(text.splitlines())}: no JSON" in found["notices"]
    file.write_text(text.splitlines()[0][:-200], encoding="utf-8")
    assert main(["audit", str(tmp_path), "--model", str(MODEL)]) == 2


def test_a_file_of_another_shape_than_the_model_is_left_out(
    tmp_path: Path, samples: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(MILES, tmp_path / "3.pt")
    for sample in samples:
        sample["rollout_routed_experts"] = np.repeat(sample["rollout_routed_experts"], 2, 1)
    torch.save({"rollout_id": 4, "samples": samples}, tmp_path / "4.pt")
    assert main(["audit", str(tmp_path), "--model", str(MODEL)]) == 0
    assert f"note: not read: {tmp_path / '4.pt'}: sequence 0: rollout_experts: got 8 layers" in capsys.readouterr().out
    (tmp_path / "3.pt").unlink()
    assert main(["audit", str(tmp_path), "--model", str(MODEL)]) == 2


def test_a_dump_without_a_sequence_is_no_healthy_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"rollout_id": 3, "samples": []}, tmp_path / "3.pt")
    assert main(["audit", str(tmp_path)]) == 2
    assert f"{tmp_path}: holds no sequence" in capsys.readouterr().err


def test_links_in_a_circle_and_names_that_are_no_text_end_no_audit(tmp_path: Path) -> None:
    shutil.copy(MILES, tmp_path / "3.pt")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "4.pt").symlink_to("5.pt")
    (tmp_path / "5.pt").symlink_to("4.pt")
    (tmp_path / "6.pt").mkdir()
    Path(f"{tmp_path}/7_\udcff.pt").write_bytes(b"PK")
    report = tmp_path / "found.html"
    assert main(["audit", str(tmp_path), "--model", str(MODEL), "--html", str(report)]) == 0
    assert "7_" in report.read_text(encoding="utf-8")


def test_miles_parquet_reads_as_its_torch_dump(tmp_path: Path, samples: list[dict[str, Any]]) -> None:
    rows = [
        {key: sample[key] for key in ("tokens", "response_length", "reward", "index", "loss_mask", "rollout_log_probs")}
        for sample in samples
    ]
    columns: dict[str, Any] = {key: [row[key] for row in rows] for key in rows[0]}
    encoded = []
    for number, sample in enumerate(samples):
        torch.save(sample["rollout_routed_experts"], tmp_path / f"{number}.bin")
        encoded.append((tmp_path / f"{number}.bin").read_bytes())
        (tmp_path / f"{number}.bin").unlink()
    table = pa.table({**columns, "rollout_routed_experts": encoded}).replace_schema_metadata(
        {
            b"miles.rollout_dump.version": b"1",
            b"rollout_id": b"3",
            b"miles.encoded": b'["rollout_routed_experts"]',
            b"miles.missing": b"{}",
            b"miles.rows": str(len(rows)).encode(),
        }
    )
    pq.write_table(table, tmp_path / "3.parquet")
    assert recognised(load(tmp_path / "3.parquet")) == "slime"
    found, expected = sequences_in(tmp_path / "3.parquet"), sequences_in(MILES)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.columns.keys() == other.columns.keys()
        for name, values in one.columns.items():
            np.testing.assert_array_equal(values, other.columns[name])
    plain = [
        {**row, "rollout_routed_experts": s["rollout_routed_experts"].tolist()}
        for row, s in zip(rows, samples, strict=True)
    ]
    pq.write_table(pa.Table.from_pylist(plain).replace_schema_metadata({b"rollout_id": b"3"}), tmp_path / "4.parquet")
    for one, other in zip(sequences_in(tmp_path / "4.parquet"), expected, strict=True):
        np.testing.assert_array_equal(one.columns["rollout_experts"], other.columns["rollout_experts"])


def test_parquet_of_something_else_is_no_dump(tmp_path: Path) -> None:
    pq.write_table(pa.table({"tokens": [[1, 2]]}), tmp_path / "rollout_3.parquet")
    assert recognised(load(tmp_path / "rollout_3.parquet")) is None


def areal_file(samples: list[dict[str, Any]], path: Path) -> None:
    """What AReaL's `_save_trajectory` writes of its `RLVRWorkflow`'s trajectories."""
    batches = []
    for number, sample in enumerate(samples):
        length, response = len(sample["tokens"]), sample["response_length"]
        prompt = length - response
        experts = sample["rollout_routed_experts"].astype(np.int32)
        whole = np.concatenate([experts, experts[-1:]])
        padding = 3 if number % 2 else 0
        batch = {
            "input_ids": torch.tensor([sample["tokens"]], dtype=torch.int32),
            "loss_mask": torch.tensor([[0] * prompt + [1] * response], dtype=torch.int32),
            "logprobs": torch.tensor([[0.0] * prompt + list(sample["rollout_log_probs"])]),
            "versions": torch.tensor([[-1] * prompt + [7] * response], dtype=torch.int32),
            "attention_mask": torch.ones(1, length, dtype=torch.bool),
            "routed_experts": torch.from_numpy(whole)[None],
        }
        padded = {
            name: torch.cat([values, torch.zeros(1, padding, *values.shape[2:], dtype=values.dtype)], 1)
            for name, values in batch.items()
        }
        rest = {"rewards": torch.tensor([float(sample["reward"])]), "r3_routing_valid": torch.tensor([number != 2])}
        batches.append({**padded, **rest})
    torch.save(batches, path)


def test_areal_reads_as_the_same_run(tmp_path: Path, samples: list[dict[str, Any]]) -> None:
    areal_file(samples, tmp_path / "step_000003.pt")
    assert recognised(load(tmp_path / "step_000003.pt")) == "areal"
    for number, (one, other) in enumerate(zip(sequences_in(tmp_path), sequences_in(MILES), strict=True)):
        for name in ("token_ids", "loss_mask"):
            np.testing.assert_array_equal(one.columns[name], other.columns[name])
        routes = one.columns["rollout_experts"]
        assert (routes[-1] == -1).all()
        if number == 2:
            assert (routes == -1).all()
        else:
            np.testing.assert_array_equal(routes[:-1], other.columns["rollout_experts"][:-1])
        assert one.reward == other.reward
        assert set(one.columns["weight_versions"][one.columns["loss_mask"]]) == {7}
