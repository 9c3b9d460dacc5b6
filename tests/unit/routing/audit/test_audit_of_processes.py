# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The audit of a job of two processes: each has the numbers and the findings of both."""

import os
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from nemo_rl_moe.routing.hooks.routes import anomalies_of, audit_sequences
from nemo_rl_moe.runs.folder.captured_sequences import CaptureDescription, CapturedSequence
from tests.support.gloo_ranks import run_ranks

DESCRIPTION = CaptureDescription((0, 1, 2), 8, 2)
FAULTS = ("none", "layer", "swapped", "lost", "foreign", "repeated")


def sequences_of(rank: int, fault: str) -> list[CapturedSequence]:
    """Twenty sequences of a process, rank 1's with the fault."""
    generator, found = np.random.default_rng(rank), []
    for _ in range(20):
        live = generator.random((50, 3, 8)).argsort(-1)[..., :2].astype(np.int16)
        found.append({"training_experts": live, "rollout_experts": live[:-1].copy()})
    captures = [columns["rollout_experts"] for columns in found]
    if rank == 1 and fault == "layer":
        for capture in captures:
            capture[:, 2] = capture[:, 1]
    if rank == 1 and fault == "swapped":
        captures[0][:], captures[1][:] = captures[1].copy(), captures[0].copy()
    if rank == 1 and fault == "lost":
        for capture in captures:
            capture[:] = -1
    if rank == 1 and fault == "foreign":
        for capture in captures:
            capture[:] = capture[generator.permutation(len(capture))]
    if rank == 1 and fault == "repeated":
        for capture in captures[:4]:
            capture[4:40] = capture[4]
    return [CapturedSequence(str(number), 50, columns) for number, columns in enumerate(found)]


def audits_of_both(store: str) -> dict[str, Any]:
    """Runs on both ranks: metrics, texts and loads of each fault."""
    rank, found = int(os.environ["RANK"]), {}
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        for fault in FAULTS:
            audited = audit_sequences(DESCRIPTION, 1, sequences_of(rank, fault))
            texts = [anomaly.text for anomaly in anomalies_of(audited)]
            found[fault] = {"metrics": dict(audited.metrics), "texts": texts, "sequences": audited.num_sequences}
        idle = audit_sequences(DESCRIPTION, 1, sequences_of(0, "none") if rank == 0 else [])
        found["one of them idle"] = {"metrics": dict(idle.metrics), "texts": [], "sequences": idle.num_sequences}
    finally:
        dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def audits(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what both ranks found, by fault."""
    return run_ranks(audits_of_both, 2, str(tmp_path_factory.mktemp("store") / "rendezvous"))


def test_both_say_the_same(audits: list[dict[str, Any]]) -> None:
    assert audits[0] == audits[1]


def test_numbers_are_those_of_one_process_with_all_sequences(audits: list[dict[str, Any]]) -> None:
    alone = audit_sequences(DESCRIPTION, 1, sequences_of(0, "none") + sequences_of(1, "none"))
    assert audits[0]["none"] == {"metrics": alone.metrics, "texts": [], "sequences": 40}
    half = audit_sequences(DESCRIPTION, 1, sequences_of(0, "none"))
    assert audits[1]["one of them idle"] == {"metrics": half.metrics, "texts": [], "sequences": 20}


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("layer", "the writer rank-1 has routes that are not its tokens'"),
        ("swapped", "sequence 0 of rank-1 carries the routes of sequence 1 of rank-1"),
        ("foreign", "the writer rank-1 has routes that are not its tokens'"),
        ("repeated", "tokens carry the routes of the token before them"),
    ],
)
def test_the_process_that_does_not_log_is_looked_at_too(audits: list[dict[str, Any]], fault: str, text: str) -> None:
    assert any(text in reported for reported in audits[0][fault]["texts"]), audits[0][fault]["texts"]


def test_routes_that_one_process_lacks_are_counted(audits: list[dict[str, Any]]) -> None:
    metrics = audits[0]["lost"]["metrics"]
    assert metrics["moe/routing/rows_missing_in_one_rank"] == 1
    assert metrics["moe/routing/rank_with_missing_rows"] == 1
