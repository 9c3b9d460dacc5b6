# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The command: what it prints, its JSON, its exit codes."""

import dataclasses
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from nemo_rl_moe.cli import main
from nemo_rl_moe.routing.audit.audited_run import AuditedRun
from nemo_rl_moe.routing.audit.command import COMPARISONS
from nemo_rl_moe.runs.folder.capture_folder import CaptureFolderWriter
from nemo_rl_moe.runs.folder.captured_sequences import CaptureDescription, CapturedSequence
from nemo_rl_moe.runs.folder.folder import create_run_folder

DESCRIPTION = CaptureDescription((0, 1, 2), 8, 2, "a test")


def write_capture(folder: Path, *, late: bool = False) -> Path:
    writer = CaptureFolderWriter(folder, DESCRIPTION)
    generator = np.random.default_rng(1)
    for step in (4, 9):
        sequences = []
        for number in range(8):
            live = generator.random((60, 3, 8)).argsort(-1)[..., :2].astype(np.int16)
            capture = live[:-1].copy()
            if late and step == 9:
                capture[1:] = live[:-2]
            sequences.append(CapturedSequence(f"s{number}", 60, {"rollout_experts": capture, "training_experts": live}))
        writer.write(step, sequences)
    return folder


def test_a_healthy_capture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(write_capture(tmp_path / "capture"))]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "2 steps, 16 sequences, 960 tokens, a test" in printed.out
    assert "no findings" in printed.out
    assert "replayed_logprobs: how much of the mismatch is routing" in printed.out


def test_what_cannot_be_compared_is_named_and_can_be_required(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generator = np.random.default_rng(4)
    routes = generator.random((59, 3, 8)).argsort(-1)[..., :2].astype(np.int16)
    writer = CaptureFolderWriter(tmp_path / "rollout", DESCRIPTION)
    writer.write(1, [CapturedSequence("a", 60, {"rollout_experts": routes})])
    whole = write_capture(tmp_path / "both")
    assert main(["audit", str(tmp_path / "rollout")]) == 0
    printed = capsys.readouterr().out
    assert "NOT CHECKED: whether the routes are those of these tokens and layers: there is no training side" in printed
    assert printed.endswith("no findings in what was checked\n")
    assert main(["audit", str(tmp_path / "rollout"), "--require", "training"]) == 4
    assert "--require: NOT CHECKED: " in capsys.readouterr().err
    assert main(["audit", str(whole), "--require", "training"]) == 0
    assert main(["audit", str(whole), "--require", "training", "--require", "logprobs"]) == 4


def test_required_comparisons_are_those_of_an_audit(tmp_path: Path) -> None:
    assert tuple(AuditedRun(tmp_path, DESCRIPTION, []).not_checked) == COMPARISONS


def test_a_wrong_replay_is_reported_even_if_something_required_is_missing(tmp_path: Path) -> None:
    late = write_capture(tmp_path / "late", late=True)
    assert main(["audit", str(late), "--require", "logprobs"]) == 1


def test_tokens_that_training_does_not_know_are_no_padding(tmp_path: Path) -> None:
    generator = np.random.default_rng(2)
    live = generator.random((60, 3, 8)).argsort(-1)[..., :2].astype(np.int16)
    known = live.copy()
    known[10:20] = -1
    columns = {"rollout_experts": live[:-1], "training_experts": known}
    CaptureFolderWriter(tmp_path / "capture", DESCRIPTION).write(1, [CapturedSequence("a", 60, columns)])
    output = tmp_path / "audit.json"
    assert main(["audit", str(tmp_path / "capture"), "--json", str(output)]) == 0
    ((step,),) = [run["steps"] for run in json.loads(output.read_text())]
    assert step["metrics"]["moe/routing/rows_expected"] == 49 * 3
    assert step["metrics"]["moe/routing/live_agreement"] == 1


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_numbers_without_an_end_end_no_audit(tmp_path: Path) -> None:
    logprobs = {name: np.full(60, -1, dtype=np.float32) for name in ("rollout_logprobs", "training_logprobs")}
    logprobs["rollout_logprobs"][7] = -np.inf
    capture, output = tmp_path / "capture", tmp_path / "audit.json"
    CaptureFolderWriter(capture, DESCRIPTION).write(
        1, [CapturedSequence("a", 60, logprobs | {"token_ids": np.arange(60)})]
    )
    assert main(["audit", str(capture), "--json", str(output), "--against", str(capture)]) == 0
    metrics = json.loads(output.read_text())[0]["steps"][0]["metrics"]
    assert (metrics["moe/routing_split/mean_abs_total"], metrics["moe/routing_split/tokens"]) == (0, 58)


@pytest.mark.parametrize("masked", [False, True])
def test_logprobs_that_one_run_lacks_are_no_finding_beside_another(
    masked: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a prompt where nothing says what is trained; otherwise they are a finding of that run alone."""
    generator = np.random.default_rng(3)
    live = generator.random((60, 3, 8)).argsort(-1)[..., :2].astype(np.int16)
    columns: dict[str, Any] = {"token_ids": np.arange(60), "rollout_experts": live[:-1], "training_experts": live}
    logprobs = np.full(60, -1, dtype=np.float32)
    unknown = np.where(np.arange(60) < 10, np.nan, logprobs)
    if masked:
        columns["loss_mask"] = np.arange(60) >= 5
    for name, found in (("whole", logprobs), ("unknown", unknown)):
        sequence = CapturedSequence("a", 60, columns | {"rollout_logprobs": found})
        CaptureFolderWriter(tmp_path / name, DESCRIPTION).write(1, [sequence])
    assert main(["audit", str(tmp_path / "whole"), "--against", str(tmp_path / "unknown")]) == 0
    assert main(["audit", str(tmp_path / "unknown"), "--against", str(tmp_path / "whole")]) == int(masked)
    assert capsys.readouterr().err.count("error: ") == int(masked)


def test_columns_that_a_file_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another program's file has neither names nor rewards, and a maker with an escape sequence."""
    capture = write_capture(tmp_path / "capture", late=True)
    for path in capture.glob("*.parquet"):
        pq.write_table(pq.read_table(path).drop_columns(["sequence", "reward"]), path)
    description = json.loads((capture / "capture.json").read_text()) | {"made_by": "\x1b[2J"}
    (capture / "capture.json").write_text(json.dumps(description))
    assert main(["audit", str(capture)]) == 1
    printed = capsys.readouterr()
    assert "step 9: routes are one token late" in printed.err
    assert "960 tokens, \\x1b[2J" in printed.out


def test_one_of_a_thing_is_singular(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    columns = {"rollout_experts": np.array([[[0, 1]]])}
    CaptureFolderWriter(tmp_path / "capture", CaptureDescription((3,), 4, 2)).write(
        1, [CapturedSequence("a", 2, columns)]
    )
    assert main(["audit", str(tmp_path / "capture")]) == 0
    assert "1 step, 1 sequence, 2 tokens\n1 MoE layer, 4 experts, 2 a token" in capsys.readouterr().out


def document_of(page: Path) -> dict[str, Any]:
    """Return what the page's script reads."""
    block = re.search(r'<script type="application/json" id="document">(.*?)</script>', page.read_text(), re.DOTALL)
    assert block is not None
    document: dict[str, Any] = json.loads(block[1])
    return document


def test_a_page_has_both_sides_and_the_findings(tmp_path: Path) -> None:
    capture, page = write_capture(tmp_path / "capture", late=True), tmp_path / "audit.html"
    assert main(["audit", str(capture), "--html", str(page)]) == 1
    document = document_of(page)
    assert document["heading"] == "Audit of routes"
    rollout, training = document["runs"]
    assert (rollout["name"], training["name"]) == ("rollout", "training")
    (finding,) = rollout["findings"]
    assert finding["text"].startswith("routes are one token late")
    assert (finding["first_step"], training["findings"]) == (9, [])
    assert rollout["load"]["num_steps"] == training["load"]["num_steps"] == 2
    assert rollout["routing"]["statistics"]["expected"] == 2 * 8 * 59 * 3
    assert training["routing"] is None
    # The routes of step 9, which are no longer their tokens', own less than those of step 4.
    assert rollout["routing"]["identity"]["step"] == 9


def findings_of(folder: Path, spoil: Callable[[int, int, np.ndarray, np.ndarray], None]) -> list[dict[str, Any]]:
    """Findings over eight steps of two writers; from step 7 on the fault is there."""
    generator = np.random.default_rng(1)
    for step in range(1, 9):
        for writer in (0, 1):
            live = generator.random((400, 3, 8)).argsort(-1)[..., :2].astype(np.int16)
            capture = live[:-1].copy()
            if step >= 7:
                spoil(step, writer, capture, live)
            columns = {"rollout_experts": capture, "training_experts": live}
            CaptureFolderWriter(folder, DESCRIPTION, f"rank-{writer}").write(
                step, [CapturedSequence(f"s{writer}", 400, columns)]
            )
    code = main(["audit", str(folder), "--json", str(folder.parent / "audit.json")])
    (run,) = json.loads((folder.parent / "audit.json").read_text())
    assert code == (1 if run["findings"] else 0)
    assert [finding for step in run["steps"] for finding in step["findings"]] == []
    found: list[dict[str, Any]] = run["findings"]
    return found


def test_steps_that_are_alike_have_no_finding(tmp_path: Path) -> None:
    assert findings_of(tmp_path / "capture", lambda *_: None) == []


def test_agreement_that_falls_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def spoil(step: int, writer: int, capture: np.ndarray, live: np.ndarray) -> None:
        capture[::5] = (capture[::5] + 4) % 8

    (finding,) = findings_of(tmp_path / "capture", spoil)
    assert (finding["kind"], finding["side"], finding["first_step"]) == ("low_agreement", "rollout", 7)
    assert f"error: {tmp_path / 'capture'}: rollout: routers would choose the rollout's experts in 0.8" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("is_exact", [True, False])
def test_rows_that_differ_are_reported_at_once_where_none_may(tmp_path: Path, is_exact: bool) -> None:
    generator = np.random.default_rng(1)
    writer = CaptureFolderWriter(tmp_path / "capture", dataclasses.replace(DESCRIPTION, is_exact=is_exact))
    for step in (1, 2):
        live = generator.random((400, 3, 8)).argsort(-1)[..., :2].astype(np.int16)
        capture = live[:-1].copy()
        capture[::50] = (capture[::50] + 1) % 8
        alone = {"rollout_experts": capture}  # which training has not seen
        writer.write(step, [CapturedSequence("s", 400, {"rollout_experts": capture, "training_experts": live})])
        writer.write(step, [CapturedSequence("alone", 400, alone)])
    main(["audit", str(tmp_path / "capture"), "--json", str(tmp_path / "audit.json")])
    (run,) = json.loads((tmp_path / "audit.json").read_text())
    assert [finding["kind"] for finding in run["findings"]] == (["float32_flips"] if is_exact else [])
    flips = [step["metrics"].get("moe/routing/float32_flips_share") for step in run["steps"]]
    assert flips == ([8 / 399] * 2 if is_exact else [None] * 2)


def test_the_writer_that_loses_routes_is_reported(tmp_path: Path) -> None:
    def spoil(step: int, writer: int, capture: np.ndarray, live: np.ndarray) -> None:
        if writer == 1:
            capture[:100] = -1

    (finding,) = findings_of(tmp_path / "capture", spoil)
    assert finding["kind"] == "missing_rows"
    assert finding["text"].startswith("the writer rank-1 has lacked 25% of the rollout's routes since step 7")


def test_an_expert_that_dies_at_once_is_reported_both_sides(tmp_path: Path) -> None:
    def spoil(step: int, writer: int, capture: np.ndarray, live: np.ndarray) -> None:
        for routes in (capture, live):
            others = (routes[:, 1] == 5).any(-1)
            routes[others, 1] = [2, 3]

    found = findings_of(tmp_path / "capture", spoil)
    assert [(finding["kind"], finding["side"], finding["layer"]) for finding in found] == [
        ("dead_experts", side, 1) for side in ("rollout", "training")
    ]


def test_two_runs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The other engine has the same tokens, a tenth of its rows differ by one expert, and layer 1 is used otherwise."""
    generator = np.random.default_rng(3)
    for name in ("here", "there"):
        writer = CaptureFolderWriter(tmp_path / name, DESCRIPTION)
        for step in (1, 2):
            sequences = []
            for number in range(4):
                live = np.random.default_rng([step, number]).random((200, 3, 8)).argsort(-1)[..., :2].astype(np.int16)
                capture = live[:-1].copy()
                logprobs = np.full(200, -1.0, dtype=np.float32)
                if name == "there":
                    capture[::10, 0] = (capture[::10, 0] + 4) % 8
                    capture[:100, 1] = [0, 1]
                    logprobs += np.float32(0.125)
                columns = {
                    "token_ids": np.random.default_rng(number).integers(100, size=200),
                    "rollout_experts": capture,
                    "rollout_logprobs": logprobs,
                }
                if number == 3:  # of each run alone
                    columns["token_ids"] = generator.integers(100, size=200)
                sequences.append(CapturedSequence(f"s{number}", 200, columns))
            writer.write(step, sequences)
    here, there, output = tmp_path / "here", tmp_path / "there", tmp_path / "audit.json"
    page = tmp_path / "audit.html"
    code = main(["audit", str(here), "--against", str(there), "--json", str(output), "--html", str(page)])
    printed = capsys.readouterr()
    assert (code, printed.err) == (0, "")
    run, other = json.loads(output.read_text())
    assert (run["capture"], other["capture"]) == (str(here), str(there))
    against = run["against"]
    same = against["same_sequences"]["rollout"]
    assert (same["num_sequences"], same["num_tokens"]) == (6, 1200)
    differing = (20 + 100 * (1 - 1 / 28)) / (3 * 199)  # of the pairs of 8 experts, [0, 1] is one
    assert same["means"]["moe/routing/live_agreement"] == pytest.approx(1 - differing, abs=0.01)
    assert same["means"]["moe/routing_split/mean_abs_total"] == pytest.approx(0.125)
    assert "training" not in against["same_sequences"]
    distance = against["load_distance"]["rollout"]
    assert distance["layer"] == 1
    # Utilization rises by 1.5 of experts 0 and 1, and falls by 0.5 of six: sqrt((2 * 1.5^2 + 6 * 0.5^2) / 7).
    assert distance["highest"] == pytest.approx((6 / 7) ** 0.5, rel=0.05)
    assert distance["mean"] < 0.36
    assert f"against {there}, means over the steps" in printed.out
    assert "rollout of 6 sequences that both have, 1,200 tokens:" in printed.out
    assert [side["name"] for side in document_of(page)["runs"]] == [f"{here}: rollout", f"{there}: rollout"]
    assert any(text.startswith("distance of the loads") for text in document_of(page)["runs"][0]["notes"])


def test_runs_of_different_models_share_no_sequence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capture = write_capture(tmp_path / "capture")
    columns = {"rollout_experts": np.array([[[0, 1]]])}
    CaptureFolderWriter(tmp_path / "other", CaptureDescription((3,), 4, 2)).write(
        4, [CapturedSequence("a", 2, columns)]
    )
    assert main(["audit", str(capture), "--against", str(tmp_path / "other")]) == 0
    assert "note: the models differ" in capsys.readouterr().out


def test_names_in_a_page_cannot_become_markup(tmp_path: Path) -> None:
    folder = tmp_path / "<img src=x onerror=alert(1)>"
    capture = write_capture(folder)
    page = tmp_path / "audit.html"
    assert main(["audit", str(capture), str(capture), "--html", str(page)]) == 0
    assert "<img" not in page.read_text()
    assert document_of(page)["runs"][0]["name"] == f"{folder}: rollout (1)"


def test_a_page_replaces_nothing_but_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capture, page = write_capture(tmp_path / "capture"), tmp_path / "notes.txt"
    page.write_text("mine")
    assert main(["audit", str(capture), "--html", str(page)]) == 2
    assert f"--html {page}: exists and is no report" in capsys.readouterr().err
    assert page.read_text() == "mine"


def test_a_fault_is_reported_with_its_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capture = write_capture(tmp_path / "capture", late=True)
    assert main(["audit", str(capture), "--json", str(tmp_path / "audit.json")]) == 1
    printed = capsys.readouterr()
    assert f"{capture}: step 9: routes are one token late" in printed.err
    assert "step 4" not in printed.err
    (found,) = json.loads((tmp_path / "audit.json").read_text())
    assert [step["step"] for step in found["steps"]] == [4, 9]
    assert found["steps"][0]["findings"] == []
    assert found["steps"][0]["metrics"]["moe/routing/live_agreement"] == 1
    assert main(["audit", str(capture), "--steps", ":4"]) == 0


def test_json_alone_on_standard_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(write_capture(tmp_path / "capture")), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["num_experts"] == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing"], "missing: there is no such file or folder"),
        (["empty"], "empty: holds neither capture.json nor files of a format that is read"),
        (["notes.txt"], "notes.txt: is neither JSON nor a pickle"),
        (["pipe.jsonl"], "pipe.jsonl: cannot be read: expected a regular file, got a pipe or a device"),
        (["notes.json"], "notes.json: is of no format that is known; --format takes auto, capture"),
        (["empty", "--format", "capture"], "capture.json: no description of a capture"),
        (
            ["logs/exp_001"],
            "the run has no capture; policy.megatron_cfg.routing_measurements.save_capture=true",
        ),
        (["logs/exp_001", "--format", "capture"], "logs/exp_001: the run has no capture; policy.megatron_cfg."),
        (["logs"], "logs: is the log folder of runs; did you mean logs/exp_002?"),
        (["capture", "--steps", "5:8"], "capture: holds none of the chosen steps"),
        (["capture", "--json", "none/audit.json"], "--json none/audit.json: cannot be written"),
    ],
)
def test_what_cannot_be_read_is_reported(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_capture(tmp_path / "capture")
    (tmp_path / "empty").mkdir()
    runs = [create_run_folder(tmp_path / "logs") for _ in range(3)]
    write_capture(runs[1] / "capture")
    (runs[0] / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "notes.txt").write_text("routes")
    (tmp_path / "notes.json").write_text("[1]")
    os.mkfifo(tmp_path / "pipe.jsonl")
    monkeypatch.chdir(tmp_path)
    assert main(["audit", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_steps_that_are_none_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["audit", "capture", "--steps", "a:8"])
    assert ended.value.code == 2
    assert "argument --steps: got 'a:8', expected FIRST:LAST" in capsys.readouterr().err


@pytest.mark.parametrize("ids", [[3, 0, 1, 2, 7, 4, 5, 6], [0, 5, 2, 3, 4, 1, 6, 7]])
def test_permuted_ids_of_every_step_are_one_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ids: list[int]
) -> None:
    """In no other layer do they agree beyond chance, and the cause is reported once."""
    capture, generator = tmp_path / "capture", np.random.default_rng(1)
    writer = CaptureFolderWriter(capture, DESCRIPTION)
    for step in range(1, 31):
        sequences = []
        for number in range(4):
            live = (generator.gumbel(size=(60, 3, 8)) + np.linspace(0, 2, 8)).argsort(-1)[..., -2:].astype(np.int16)
            captured = np.where(generator.random((59, 3, 1)) < 0.01, live[1:], live[:-1])  # as rounding does it
            captured[:, 1] = np.array(ids)[captured[:, 1]]
            sequences.append(
                CapturedSequence(f"s{number}", 60, {"rollout_experts": captured, "training_experts": live})
            )
        writer.write(step, sequences)
    assert main(["audit", str(capture)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    pairs = sorted((own, captured) for captured, own in enumerate(ids) if own != captured)
    named = ", ".join(f"{own}->{captured}" for own, captured in pairs[:4])
    assert (
        "steps 1 to 30 (30 of them), at first: layer 1: captured expert ids are a permutation of the router's" in line
    )
    assert f"({named}" in line
