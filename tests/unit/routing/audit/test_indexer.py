# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Positions of sparse attention's indexer: causal, each once, counted from the start of their sequence."""

from typing import Any

import numpy as np
import pytest

from nemo_rl_moe.routing.audit.indexer import IndexerCounts
from nemo_rl_moe.runs.folder.captured_sequences import CapturedRows

LENGTH, LAYERS, K = 30, 2, 8


def chosen(seed: int = 0) -> np.ndarray:
    """Random positions up to each token, -1 where there are fewer; the last token has none."""
    generator = np.random.default_rng(seed)
    found = np.full((LENGTH, LAYERS, K), -1, dtype=np.int32)
    for token in range(LENGTH - 1):
        for layer in range(LAYERS):
            number = min(token + 1, K)
            found[token, layer, :number] = generator.permutation(token + 1)[:number]
    return found


def counted(rollout: np.ndarray, training: np.ndarray | None = None) -> IndexerCounts:
    counts = IndexerCounts()
    columns = {"rollout_indexer": rollout} | ({} if training is None else {"training_indexer": training})
    counts.add(CapturedRows(1, ("a",), np.array([LENGTH]), columns, None))
    return counts


def test_right_positions_have_no_finding() -> None:
    counts = counted(chosen(), chosen()[..., ::-1])
    assert counts.anomalies() == []
    assert counts.metrics() == {"rows": 58.0, "rows_missing_share": 0.0, "overlap": 1.0}


@pytest.mark.parametrize(
    ("place", "value", "text"),
    [
        (
            chosen() >= 0,
            chosen()[chosen() >= 0] + 100,
            "58 are right if their sequence's start is subtracted: they count from the batch's start",
        ),
        (np.s_[5, 0, 0], 9, "1 of 58 rows of the indexer name positions after their token"),
        (np.s_[20, 1], chosen()[20, 1, 0], "1 of 58 rows of the indexer name a position twice"),
        (np.s_[20, 1, 0], -7, "1 of 58 rows of the indexer name positions below 0"),
        (np.s_[20:25, :, 4:], -1, "10 of 58 rows of the indexer name fewer positions than their token can attend to"),
    ],
    ids=["packed", "ahead", "repeated", "negative", "short"],
)
def test_wrong_positions_are_named(place: Any, value: Any, text: str) -> None:
    rows = chosen()
    rows[place] = value
    (anomaly,) = counted(rows).anomalies()
    assert text in anomaly.text


def test_other_positions_than_trainings_are_named() -> None:
    other = chosen(seed=1)
    (anomaly,) = counted(chosen(), other).anomalies()
    assert anomaly.text.startswith("the indexers of rollout and training have 0.")
