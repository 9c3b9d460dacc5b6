# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Positions of sparse attention's indexer: causal, each once, counted from the start of their sequence."""

from collections.abc import Callable

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


def _packed(rows: np.ndarray) -> None:
    rows[rows >= 0] += 100


def _ahead(rows: np.ndarray) -> None:
    rows[5, 0, 0] = 9


def _repeated(rows: np.ndarray) -> None:
    rows[20, 1] = rows[20, 1, 0]


def _negative(rows: np.ndarray) -> None:
    rows[20, 1, 0] = -7


def _short(rows: np.ndarray) -> None:
    rows[20:25, :, 4:] = -1


def test_right_positions_have_no_finding() -> None:
    counts = counted(chosen(), chosen()[..., ::-1])
    assert counts.anomalies() == []
    assert counts.metrics() == {"rows": 58.0, "rows_missing_share": 0.0, "overlap": 1.0}


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (_packed, "58 are right if their sequence's start is subtracted: they count from the batch's start"),
        (_ahead, "1 of 58 rows of the indexer name positions after their token"),
        (_repeated, "1 of 58 rows of the indexer name a position twice"),
        (_negative, "1 of 58 rows of the indexer name positions below 0"),
        (_short, "10 of 58 rows of the indexer name fewer positions than their token can attend to"),
    ],
)
def test_wrong_positions_are_named(fault: Callable[[np.ndarray], None], text: str) -> None:
    rows = chosen()
    fault(rows)
    (anomaly,) = counted(rows).anomalies()
    assert text in anomaly.text


def test_other_positions_than_trainings_are_named() -> None:
    other = chosen(seed=1)
    (anomaly,) = counted(chosen(), other).anomalies()
    assert anomaly.text.startswith("the indexers of rollout and training have 0.")
