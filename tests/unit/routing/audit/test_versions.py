# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Responses of several weight versions: whether each token carries its own routes or the newest ones."""

import numpy as np
import pytest

from nemo_rl_moe.routing.audit.versions import PREFIX, VersionRows, version_note

LAYERS, EXPERTS, TOPK, LENGTH, PROMPT = 4, 16, 2, 60, 10


def metrics(older_rows: str, changed: float = 0.2, seed: int = 0) -> dict[str, float]:
    """A step of weights 7: sequences of 5 and of 7 alone, and others that 5 began and 7 ended."""
    generator = np.random.default_rng(seed)
    rows = VersionRows()
    for kind in ("old", "new", "both") * 6:
        live = generator.random((LENGTH, LAYERS, EXPERTS)).argsort(-1)[..., :TOPK].astype(np.int16)
        older = live.copy()
        differs = generator.random(older.shape[:2]) < changed
        older[differs] = generator.random((int(differs.sum()), EXPERTS)).argsort(-1)[:, :TOPK]
        versions = np.full(LENGTH, 5 if kind == "old" else 7)
        capture = older if kind == "old" else live.copy()
        if kind == "both":
            versions[:40] = 5
            if older_rows == "own":
                capture[:39] = older[:39]
        trained = np.arange(LENGTH) >= PROMPT
        rows.add(capture, live, versions, trained, np.array([LENGTH]))
    return rows.metrics()


@pytest.mark.parametrize(
    ("older_rows", "text"),
    [("own", "the routes of the version that sampled it"), ("newest", "the routes of the newest version")],
)
def test_the_practice_of_a_dump_is_named(older_rows: str, text: str) -> None:
    for seed in range(5):
        found = metrics(older_rows, seed=seed)
        names = ("rows", "agreement", "agreement_of_own", "agreement_of_newest")
        note = version_note(*(found[f"{PREFIX}{name}"] for name in names))
        assert text in note
        assert note.endswith("the newest fit training better")


def test_nothing_is_said_where_versions_route_alike() -> None:
    assert metrics("own", changed=0.0) == {}
