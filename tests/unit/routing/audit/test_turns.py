# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Routes by turns: fillers at the ends of turns, paths without routes, and healthy conversations."""

from typing import Any

import numpy as np
import pytest

from nemo_rl_moe.routing.audit.turns import TurnCounts

LAYERS, EXPERTS, TOPK, LENGTH = 3, 8, 2, 40
Conversation = tuple[np.ndarray, np.ndarray, np.ndarray]
ENDS = (14, 27)
"""Last tokens of the first two of three turns."""


def conversations(number: int, seed: int = 0) -> list[Conversation]:
    """Rollout's routes, training's, and the mask of conversations of three turns; every 50th row differs."""
    generator = np.random.default_rng(seed)
    found = []
    for _ in range(number):
        live = generator.random((LENGTH, LAYERS, EXPERTS)).argsort(-1)[..., :TOPK].astype(np.int16)
        capture = live.copy()
        differs = generator.random(capture.shape[:2]) < 0.02
        capture[differs] = generator.random((int(differs.sum()), EXPERTS)).argsort(-1)[:, :TOPK]
        capture[-1] = -1
        mask = np.zeros(LENGTH, dtype=bool)
        for first, last in ((8, ENDS[0]), (20, ENDS[1]), (33, LENGTH - 1)):
            mask[first : last + 1] = True
        found.append((capture, live, mask))
    return found


def counted(made: list[Conversation], *, live: bool = True) -> TurnCounts:
    counts = TurnCounts()
    captures, lives, masks = (np.concatenate(columns) for columns in zip(*made, strict=True))
    counts.add(captures, lives if live else None, masks, np.full(len(made), LENGTH))
    return counts


@pytest.mark.parametrize("live", [True, False])
def test_healthy_turns_have_no_finding(live: bool) -> None:
    for seed in range(20):
        assert counted(conversations(8, seed), live=live).anomalies() == []


@pytest.mark.parametrize(
    ("filler", "live", "text"),
    [
        (np.arange(TOPK), True, "the last token of 32 of 32 turns carries filler routes"),
        (np.arange(TOPK), False, "the last token of 32 of 32 turns carries filler routes"),
        (0, False, "the last token of 32 of 32 turns carries filler routes"),
        (-1, True, "the last token of 32 of 32 turns lacks its routes"),
        ("of the token before", True, "the last tokens of turns do not carry their own routes"),
    ],
)
def test_a_filler_at_the_end_of_turns_is_named(filler: Any, live: bool, text: str) -> None:
    made = conversations(16)
    for capture, _, _ in made:
        capture[list(ENDS)] = capture[[end - 1 for end in ENDS]] if isinstance(filler, str) else filler
    (anomaly,) = counted(made, live=live).anomalies()
    assert (anomaly.kind, anomaly.text[: len(text)]) == ("turn_end", text)


def test_a_turn_that_no_request_follows_needs_no_row() -> None:
    made = conversations(16)
    for capture, _, mask in made:
        mask[33:] = False
        capture[ENDS[1] :] = -1  # the environment's answer ends it, and was never an input
    assert counted(made).anomalies() == []


def test_an_end_token_that_always_takes_the_first_experts_is_no_filler() -> None:
    made = conversations(16)
    for capture, live, _ in made:
        capture[list(ENDS)] = live[list(ENDS)] = np.arange(TOPK)
    assert counted(made).anomalies() == []


def test_a_path_without_routes_is_named_by_its_turns() -> None:
    made = conversations(6)
    for capture, _, _ in made:
        capture[:] = -1
    counts = counted(made)
    of_one_turn = conversations(10, seed=1)
    for _, _, mask in of_one_turn:
        mask[:33] = False
    captures, lives, masks = (np.concatenate(columns) for columns in zip(*of_one_turn, strict=True))
    counts.add(captures, lives, masks, np.full(10, LENGTH))
    (anomaly,) = counts.anomalies()
    assert anomaly.kind == "path"
    assert anomaly.text.startswith("6 of 6 sequences of 3 turns have no routes, and of the others 100% have theirs")


def test_sequences_without_a_column_count_as_without_routes() -> None:
    made = conversations(4)
    counts = TurnCounts()
    counts.add(None, None, np.concatenate([mask for _, _, mask in made]), np.full(4, LENGTH))
    assert counts.sequences.tolist() == [[0, 0], [0, 0], [4, 0], [0, 0]]
