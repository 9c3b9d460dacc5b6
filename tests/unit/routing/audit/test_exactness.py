# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities that should be equal bit for bit, and expert biases that stand still, in captures."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nemo_rl_moe.cli import main
from nemo_rl_moe.routing.audit.exactness import ExactCounts
from nemo_rl_moe.routing.audit.expert_bias import BiasHistory
from nemo_rl_moe.runs.folder.capture_folder import CaptureFolderWriter, read_description, read_step, steps_of
from nemo_rl_moe.runs.folder.captured_sequences import CaptureDescription, CapturedRows, CapturedSequence, rows_of

LAYERS, EXPERTS, TOPK, LENGTH = (1, 3), 8, 2, 20
DESCRIPTION = CaptureDescription(LAYERS, EXPERTS, TOPK, is_bitwise=True)


def sequences(number: int = 4) -> list[CapturedSequence]:
    """Sequences whose two sides are equal."""
    generator = np.random.default_rng(0)
    found = []
    for place in range(number):
        experts = generator.random((LENGTH, 2, EXPERTS)).argsort(-1)[..., :TOPK].astype(np.int16)
        logprobs = -generator.random(LENGTH).astype(np.float32)
        columns = {"rollout_experts": experts[:-1], "training_experts": experts}
        columns |= {"rollout_logprobs": logprobs, "training_logprobs": logprobs.copy()}
        found.append(CapturedSequence(str(place), LENGTH, columns))
    return found


def counted(made: list[CapturedSequence]) -> ExactCounts:
    counts = ExactCounts(LAYERS)
    rows: CapturedRows = rows_of(DESCRIPTION, 1, made)
    counts.add(rows, np.ones(len(rows.columns["rollout_logprobs"]), dtype=bool))
    return counts


def changed(sequence: CapturedSequence, token: int) -> CapturedSequence:
    """The last bit of a log-probability differs."""
    logprobs = sequence.columns["training_logprobs"].copy()
    logprobs[token] = np.nextafter(logprobs[token], np.float32(0))
    return replace(sequence, columns={**sequence.columns, "training_logprobs": logprobs})


def rerouted(sequence: CapturedSequence, token: int, layer: int) -> CapturedSequence:
    experts = sequence.columns["training_experts"].copy()
    experts[token, layer] = (experts[token, layer] + 1) % EXPERTS
    return replace(sequence, columns={**sequence.columns, "training_experts": experts})


def test_equal_log_probabilities_have_no_finding() -> None:
    counts = counted(sequences())
    assert counts.anomalies() == []
    assert counts.metrics() == {"unequal_logprobs": 0.0, "unequal_logprobs_share": 0.0}


def test_the_layer_where_routes_part_is_named() -> None:
    made = sequences()
    made[0] = rerouted(changed(made[0], 9), 6, 1)
    made[1] = rerouted(changed(made[1], 9), 9, 0)  # the row behind the log-probability says nothing about it
    (anomaly,) = counted(made).anomalies()
    assert anomaly.text == (
        "2 of 80 log-probs of rollout and training are not equal, in 2 of 4 sequences: in 1 routes first differ in"
        " layer 3, in 1 the routes before are equal (attention, a dense layer or the output layer differs)"
    )


@pytest.mark.parametrize("is_bitwise", [True, False])
def test_only_a_claim_can_be_broken(is_bitwise: bool, tmp_path: Path) -> None:
    made = sequences()
    made[2] = changed(made[2], 5)
    CaptureFolderWriter(tmp_path, replace(DESCRIPTION, is_bitwise=is_bitwise, is_exact=True)).write(1, made)
    assert read_description(tmp_path).is_bitwise == is_bitwise
    assert main(["audit", str(tmp_path)]) == int(is_bitwise)


def test_a_bias_that_stands_still_is_counted() -> None:
    history, bias = BiasHistory(), np.zeros((2, EXPERTS), dtype=np.float32)
    found = []
    for step in range(6):
        bias = bias.copy()
        bias[0] += 1
        bias[1] += step < 3
        found.append(history.metrics(bias).get("moe/expert_bias_frozen_layers"))
    assert found == [None, None, None, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(("is_updated", "frozen"), [(None, None), (False, None), (True, 2.0)])
def test_a_bias_that_never_moves_is_only_wrong_where_it_should(is_updated: bool | None, frozen: float | None) -> None:
    history, bias = BiasHistory(is_updated), np.ones((2, EXPERTS), dtype=np.float32)
    assert history.metrics(bias) == {}
    assert history.metrics(bias).get("moe/expert_bias_frozen_layers") == frozen
    assert history.metrics(None) == {}


def test_the_bias_before_the_last_update_decides_where_it_is_known() -> None:
    """+rate and -rate between two steps leave it as it was, and so does an update that was skipped."""
    history, bias = BiasHistory(), np.zeros((2, EXPERTS), dtype=np.float32)
    moved = bias + np.float32(0.001)
    assert history.metrics(moved, bias).keys() == {"moe/routing/expert_bias_max_abs"}
    for _ in range(3):
        assert history.metrics(None) == {}
        assert history.metrics(moved, bias).get("moe/expert_bias_frozen_layers") is None
    of_one_layer = np.stack([bias[0], moved[1]])
    assert history.metrics(of_one_layer, bias).get("moe/expert_bias_frozen_layers") == 1.0
    assert BiasHistory().metrics(bias, bias)["moe/expert_bias_frozen_layers"] == 2.0, "in the first step already"
    assert "moe/expert_bias_frozen_layers" not in BiasHistory(is_updated=False).metrics(bias, bias), "by choice"


@pytest.mark.parametrize("is_frozen", [True, False])
def test_a_bias_that_no_update_moves_is_found_with_any_steps_between(
    is_frozen: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps of a healthy run here look alike: its biases go up and down."""
    writer, bias = CaptureFolderWriter(tmp_path, replace(DESCRIPTION, is_bitwise=False)), np.zeros((2, EXPERTS))
    for step in (10, 20, 30):
        writer.write(step, sequences(), bias, bias - (0.0 if is_frozen else 0.001))
    (rows,) = read_step(read_description(tmp_path), 20, steps_of(tmp_path)[20])
    assert rows.expert_bias_before is not None
    np.testing.assert_array_equal(rows.expert_bias_before, np.full((2, EXPERTS), 0 if is_frozen else -0.001, "f4"))
    assert main(["audit", str(tmp_path)]) == int(is_frozen)
    assert ("the expert bias of 2 layers has not moved since step 10" in capsys.readouterr().err) == is_frozen


def test_a_frozen_bias_in_a_capture_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer, bias = CaptureFolderWriter(tmp_path, replace(DESCRIPTION, is_bitwise=False)), np.zeros((2, EXPERTS))
    for step in range(1, 6):
        bias = bias + 0.001 * (step < 3)
        writer.write(step, sequences(), bias)
    (rows,) = read_step(read_description(tmp_path), 2, steps_of(tmp_path)[2])
    assert rows.expert_bias is not None
    np.testing.assert_array_equal(rows.expert_bias, np.full((2, EXPERTS), 0.002, dtype=np.float32))
    assert main(["audit", str(tmp_path)]) == 1
    assert "the expert bias of 2 layers has not moved since step 3" in capsys.readouterr().err


def test_a_bias_of_another_shape_is_refused(tmp_path: Path) -> None:
    writer, right, wrong = CaptureFolderWriter(tmp_path, DESCRIPTION), np.zeros((2, EXPERTS)), np.zeros((3, EXPERTS))
    with pytest.raises(ValueError, match="expert_bias has the shape"):
        writer.write(1, sequences(), wrong)
    with pytest.raises(ValueError, match="expert_bias_before has the shape"):
        writer.write(1, sequences(), right, wrong)
