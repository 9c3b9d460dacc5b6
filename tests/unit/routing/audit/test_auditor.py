# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The audit of captures with planted faults and without, and its numbers against a walk over all rows."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from nemo_rl_moe.routing.agreement.statistics import RoutingReport
from nemo_rl_moe.routing.audit.auditor import AuditedStep, audit_step
from nemo_rl_moe.runs.folder.capture_folder import (
    CaptureFolderWriter,
    read_description,
    read_step,
    steps_of,
    writers_of,
)
from nemo_rl_moe.runs.folder.captured_sequences import CaptureDescription, CapturedSequence

NUM_LAYERS, NUM_EXPERTS, TOPK = 4, 8, 2
STEP = 3
DESCRIPTION = CaptureDescription((0, 2, 3, 5), NUM_EXPERTS, TOPK)
Sequences = list[dict[str, np.ndarray]]


def healthy(num_sequences: int = 20, seed: int = 5, flips: float = 0.02) -> Sequences:
    """Sequences whose training differs from the rollout in a share of the rows."""
    generator = np.random.default_rng(seed)
    found = []
    for _ in range(num_sequences):
        length = int(generator.integers(30, 80))
        live = generator.random((length, NUM_LAYERS, NUM_EXPERTS)).argsort(-1)[..., :TOPK].astype(np.int16)
        capture = live[..., ::-1].copy()  # the order of the experts says nothing
        flipped = generator.random(capture.shape[:2]) < flips
        capture[flipped] = generator.random((int(flipped.sum()), NUM_EXPERTS)).argsort(-1)[:, :TOPK]
        logprobs = -generator.random(length).astype(np.float32)
        noise, routing = (scale * generator.standard_normal(length).astype(np.float32) for scale in (1e-3, 1e-2))
        found.append(
            {
                "token_ids": generator.integers(100, size=length),
                "loss_mask": np.arange(length) >= 10,
                "rollout_experts": capture[:-1],
                "training_experts": live,
                "repeated_experts": live,
                "rollout_logprobs": logprobs,
                "replayed_logprobs": logprobs + noise,
                "training_logprobs": logprobs + noise + routing,
                "repeated_logprobs": logprobs + noise + routing,
                "margins": generator.random((length, NUM_LAYERS)).astype(np.float32),
            }
        )
    return found


def written(folder: Path, sequences: Sequences, *without: str) -> list[str]:
    """Writes a step as two ranks do; their names."""
    half, names = len(sequences) // 2, ["rank-0", "rank-1"]
    for name, part in zip(names, (range(half), range(half, len(sequences))), strict=True):
        kept = [{key: values for key, values in sequences[n].items() if key not in without} for n in part]
        rows = zip(part, kept, strict=True)
        found = [CapturedSequence(f"s{n}", len(sequences[n]["token_ids"]), columns, 0.5) for n, columns in rows]
        CaptureFolderWriter(folder, DESCRIPTION, name).write(STEP, found)
    return names


def audit_of(folder: Path) -> AuditedStep:
    description = read_description(folder)
    return audit_step(description, STEP, read_step(description, STEP, steps_of(folder)[STEP]), writers_of(folder))


def audited(folder: Path, sequences: Sequences, *without: str) -> AuditedStep:
    written(folder, sequences, *without)
    return audit_of(folder)


def report_of(found: AuditedStep) -> RoutingReport:
    assert found.report is not None
    return found.report


def test_numbers_are_those_of_a_walk_over_the_rows(tmp_path: Path) -> None:
    sequences = healthy()
    found = audited(tmp_path, sequences)
    rows = same = tokens = differing = 0
    loads = np.zeros((2, NUM_LAYERS, NUM_EXPERTS), dtype=np.int64)
    for columns in sequences:
        for capture, live in zip(columns["rollout_experts"], columns["training_experts"], strict=False):
            equal = [set(a.tolist()) == set(b.tolist()) for a, b in zip(capture, live, strict=True)]
            rows, same = rows + len(equal), same + sum(equal)
            tokens, differing = tokens + 1, differing + (not all(equal))
        for kind, name in enumerate(("rollout_experts", "training_experts")):
            for of_token in columns[name]:
                for layer, experts in enumerate(of_token):
                    loads[kind, layer, experts] += 1
    metrics = found.metrics
    assert metrics["moe/routing/rows_expected"] == rows
    assert metrics["moe/routing/live_agreement"] == pytest.approx(same / rows)
    assert metrics["moe/routing/tokens_differing_share"] == pytest.approx(differing / tokens)
    assert found.rollout_load is not None
    assert found.training_load is not None
    np.testing.assert_array_equal(found.rollout_load, loads[0])
    np.testing.assert_array_equal(found.training_load, loads[1])
    assert (found.num_sequences, found.num_tokens) == (20, sum(len(c["token_ids"]) for c in sequences))
    assert metrics["reward"] == 0.5
    trained = [columns["loss_mask"] for columns in sequences]
    gaps = [c["training_logprobs"].astype(float) - c["rollout_logprobs"] for c in sequences]
    total = np.concatenate([gap[mask] for gap, mask in zip(gaps, trained, strict=True)])
    assert metrics["moe/routing_split/mean_abs_total"] == pytest.approx(np.abs(total).mean())
    assert metrics["moe/routing_split/tokens"] == len(total)
    assert metrics["moe/routing_split/variance_share_routing"] > 0.95
    assert metrics["moe/routing_noise/rows_differing_trainer"] == 0
    assert report_of(found).anomalies == ()
    assert int(report_of(found).totals.margins[:, :, 0].sum()) == rows


def _never_written(columns: dict[str, np.ndarray]) -> None:
    columns["rollout_experts"][:, 3] = 0


def _out_of_range(columns: dict[str, np.ndarray]) -> None:
    columns["rollout_experts"][4] = NUM_EXPERTS


def _last_token_credited(columns: dict[str, np.ndarray]) -> None:
    capture = columns["rollout_experts"]
    columns["rollout_experts"] = np.concatenate([capture, capture[:1]])


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (_never_written, "hold expert 0 alone, in layers 5"),
        (_out_of_range, "name experts that do not exist, in all layers"),
        (_last_token_credited, "belong to padding or to the last token"),
    ],
)
def test_a_planted_fault_is_named(tmp_path: Path, fault: Callable[[dict[str, np.ndarray]], None], text: str) -> None:
    sequences = healthy()
    for columns in sequences:
        fault(columns)
    report = report_of(audited(tmp_path, sequences))
    assert any(text in anomaly.text for anomaly in report.anomalies)


@pytest.mark.parametrize(("name", "value"), [("rollout_logprobs", np.nan), ("training_logprobs", -np.inf)])
def test_logprobs_that_are_no_numbers_are_named_and_in_no_gap(tmp_path: Path, name: str, value: float) -> None:
    sequences = healthy()
    last = len(sequences[0][name]) - 1
    for columns in sequences[:2]:
        columns[name][1:last] = value
    found = audited(tmp_path, sequences)
    (anomaly,) = (each for each in report_of(found).anomalies if each.kind == "logprobs")
    assert f" {name} of trained tokens are NaN or infinite" in anomaly.text
    gaps = {key: value for key, value in found.metrics.items() if key.startswith("moe/routing_split/")}
    assert gaps
    assert all(np.isfinite(value) for value in gaps.values())


def test_logprobs_that_are_no_numbers_hide_no_routes_of_something_else(tmp_path: Path) -> None:
    sequences, generator = healthy(), np.random.default_rng(0)
    for columns in sequences:
        layer = columns["rollout_experts"][:, 2]
        layer[:] = generator.random((len(layer), NUM_EXPERTS)).argsort(-1)[:, :TOPK]
        columns["rollout_logprobs"][-1] = np.nan
    report = report_of(audited(tmp_path, sequences))
    assert [anomaly.kind for anomaly in report.anomalies] == ["logprobs", "unrelated"]
    assert report.metrics["routing/anomalies"] == 2


def test_logprobs_of_prompts_that_are_not_known_are_no_fault(tmp_path: Path) -> None:
    for masked in (True, False):
        sequences = healthy()
        for columns in sequences:
            columns["rollout_logprobs"][~columns["loss_mask"]] = np.nan
            if not masked:
                del columns["loss_mask"]
        assert report_of(audited(tmp_path / str(masked), sequences)).anomalies == ()


@pytest.mark.parametrize("seed", range(20))
def test_healthy_captures_have_no_finding(tmp_path: Path, seed: int) -> None:
    assert report_of(audited(tmp_path, healthy(8, seed, flips=0.2))).anomalies == ()


def test_a_row_that_stands_again_and_again_is_reported(tmp_path: Path) -> None:
    sequences = healthy()
    for columns in sequences[:2]:
        columns["rollout_experts"][4:28] = columns["rollout_experts"][4]
    report = report_of(audited(tmp_path, sequences))
    (text,) = [anomaly.text for anomaly in report.anomalies if anomaly.kind == "repeated"]
    # 23 more rows in either sequence, of which a few agree with the right ones by chance.
    assert 38 <= int(text.split(" of ")[0]) <= 46


def test_the_writer_with_the_routes_of_other_tokens_is_reported(tmp_path: Path) -> None:
    sequences = healthy(40)
    generator = np.random.default_rng(8)
    for columns in sequences[20:]:
        capture = columns["rollout_experts"]
        columns["rollout_experts"] = capture[generator.permutation(len(capture))]
    writers = written(tmp_path, sequences)
    report = report_of(audit_of(tmp_path))
    (text,) = [anomaly.text for anomaly in report.anomalies if anomaly.kind == "rank"]
    assert text.startswith(f"the writer {writers[1]} has routes that are not its tokens'")


def test_a_noise_floor_may_be_of_a_part(tmp_path: Path) -> None:
    sequences = healthy()
    for columns in sequences[:10]:  # of one writer
        columns["repeated_logprobs"] = columns["training_logprobs"] + np.float32(0.25)
    for columns in sequences[10:]:
        del columns["repeated_logprobs"], columns["repeated_experts"]
    metrics = audited(tmp_path, sequences).metrics
    assert metrics["moe/routing_noise/mean_abs_trainer"] == pytest.approx(0.25)
    assert metrics["moe/routing_noise/rows_differing_trainer"] == 0


def test_sequences_that_training_has_not_seen_are_compared_with_nothing(tmp_path: Path) -> None:
    """One writer's, beside another's: training did not route them otherwise."""
    sequences = healthy()
    alone = audited(tmp_path / "half", sequences[:10]).metrics
    for columns in sequences[10:]:
        for name in ("training_experts", "repeated_experts", "margins"):
            del columns[name]
    found = audited(tmp_path / "all", sequences)
    for name in ("live_agreement", "slot_kappa", "rows_expected", "narrow_margin_share", "tokens_differing_share"):
        assert found.metrics[f"moe/routing/{name}"] == pytest.approx(alone[f"moe/routing/{name}"]), name
    assert report_of(found).anomalies == ()
    assert found.num_sequences == 20
    sequences[15]["rollout_experts"][:] = 0
    (anomaly,) = report_of(audited(tmp_path / "zeros", sequences)).anomalies
    assert "rows hold expert 0 alone" in anomaly.text


def test_anything_may_be_absent(tmp_path: Path) -> None:
    sequences = healthy(6)
    without_training = audited(tmp_path / "a", sequences, "training_experts", "repeated_experts", "margins")
    assert without_training.report is not None
    assert "moe/routing/live_agreement" not in without_training.metrics
    assert without_training.metrics["moe/routing/rows_usable_share"] == 1
    assert without_training.training_load is None
    without_rollout = audited(tmp_path / "b", sequences, "rollout_experts", "replayed_logprobs")
    assert without_rollout.report is None
    assert "moe/routing_split/mean_abs_total" in without_rollout.metrics
    assert "moe/routing_split/mean_abs_routing" not in without_rollout.metrics
    bare = audited(tmp_path / "c", sequences, *(set(sequences[0]) - {"token_ids"}))
    assert bare.report is None
    assert set(bare.metrics) == {"reward"}
