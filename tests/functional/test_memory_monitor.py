# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Ray's memory monitor ends a worker: what the user reads, where memory is short at once and where a worker eats it."""

import os
import re
import time

import psutil
import pytest

from nemo_rl_moe.distributed.cluster import RayCluster
from nemo_rl_moe.distributed.worker_group import WorkerGroup
from nemo_rl_moe.errors import WorkerDiedError
from tests.support.grpo_inputs import cluster_config

PIECE = 50 << 20
ENDED = "was ended by Ray's memory monitor"
SHORTAGE = (
    r"the memory of [\d.]+ ran short: [\d.]+ of [\d.]+ GB in use, above the threshold of {threshold}"
    r" \(RAY_memory_usage_threshold\); the largest processes: (.+ \(pid \d+\) [\d.]+ GB, ){{4}}.+ \(pid \d+\) [\d.]+ GB"
)


class Eater:
    """A worker of which the second one takes more and more memory."""

    def __init__(self, rank: int, world_size: int):
        self.rank = rank

    def eat(self) -> None:
        kept = []
        while True:
            time.sleep(0.05)
            if self.rank == 1:
                kept.append(b"x" * PIECE)


def reported_by(monkeypatch: pytest.MonkeyPatch, threshold: float) -> str:
    """Error of two workers on a Ray with a threshold, a share of the machine's memory."""
    monkeypatch.setenv("RAY_memory_usage_threshold", f"{threshold:.4f}")
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "100")
    cluster = RayCluster(cluster_config(1, 0, 2))
    try:
        with pytest.raises(WorkerDiedError) as error:
            WorkerGroup(cluster, Eater, 120.0, 600.0).call_all(Eater.eat)
    finally:
        cluster.shutdown()
    return str(error.value)


@pytest.mark.slow
def test_short_from_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, *rest = reported_by(monkeypatch, 0.01).splitlines()
    assert re.fullmatch(r"worker rank \d( \(pid \d+\))? was ended by Ray's memory monitor while starting:", first), (
        first
    )
    assert re.fullmatch(SHORTAGE.format(threshold="1.0%"), second), second
    assert rest[-1] == "All 2 workers have been stopped."
    assert len(rest) <= 2


@pytest.mark.slow
def test_a_worker_that_takes_too_much_is_named_with_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = psutil.virtual_memory()
    reported = reported_by(monkeypatch, (memory.total - memory.available + (3 << 30)) / memory.total)
    assert re.match(
        r"worker rank \d \(pid \d+\) was ended by Ray's memory monitor in `eat`:\nthe memory of"
        r" ",
        reported,
    ), reported
    assert re.search(r"rank 1 \(pid \d+\) [1-9]\.\d+ GB", reported), reported
    assert f"(pid {os.getpid()})" not in reported or f"main process (pid {os.getpid()})" in reported
