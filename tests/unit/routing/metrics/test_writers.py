# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Divergence of loads by writer, and the writers of tokens."""

import numpy as np
import pytest

from nemo_rl_moe.routing.metrics.writers import jensen_shannon, writer_metrics
from nemo_rl_moe.token_writers import ANSWER, CALL, PROMPT, RESULT, WRITERS, token_writers


@pytest.mark.parametrize(
    ("sampled", "expected"),
    [
        ("..", [PROMPT] * 2),
        ("..ss", [PROMPT] * 2 + [ANSWER] * 2),
        (".s.s", [PROMPT, CALL, RESULT, ANSWER]),
        (".ss.s..ss", [PROMPT, CALL, CALL, RESULT, CALL, RESULT, RESULT, ANSWER, ANSWER]),
        # Nothing was sampled behind the last result: the response before it counts as the last one.
        (".s.ss.", [PROMPT, CALL, RESULT, ANSWER, ANSWER, RESULT]),
        ("s", [ANSWER]),
    ],
)
def test_writers_follow_from_what_was_sampled(sampled: str, expected: list[int]) -> None:
    assert token_writers(np.array([letter == "s" for letter in sampled])).tolist() == expected


def test_divergence_is_0_for_equal_shares_1_for_no_common_expert_and_unknown_without_tokens() -> None:
    one = np.array([[2, 2, 0], [5, 0, 0], [1, 1, 0], [0, 0, 0]])
    other = np.array([[7, 7, 0], [0, 1, 4], [1, 0, 0], [1, 2, 3]])
    found = jensen_shannon(one, other)
    assert found[:2] == pytest.approx([0, 1])
    # Entropy of (3/4, 1/4) less the mean of entropies of (1/2, 1/2) and (1, 0).
    assert found[2] == pytest.approx(-0.75 * np.log2(0.75) - 0.25 * np.log2(0.25) - 0.5)
    assert np.isnan(found[3])
    np.testing.assert_array_equal(jensen_shannon(other, one), found)


def test_metrics_are_means_over_layers_and_leave_out_what_is_unknown() -> None:
    counts = np.zeros((len(WRITERS), 2, 2), dtype=np.int64)
    counts[RESULT], counts[CALL] = [[4, 0], [3, 3]], [[0, 4], [5, 5]]
    assert writer_metrics(counts, (1, 3), per_layer=True) == pytest.approx(
        {
            "routing_writers/results_from_own": 0.5,
            "routing_writers/results_from_own_layer_1": 1.0,
            "routing_writers/results_from_own_layer_3": 0.0,
        }
    )
    counts[ANSWER] = counts[CALL]
    assert writer_metrics(counts, (1, 3), per_layer=False) == pytest.approx(
        {"routing_writers/results_from_own": 0.5, "routing_writers/calls_from_answers": 0.0}
    )
