# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Ray and the workers' processes, started before there is a worker."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import ray

from nemo_rl_moe.config.loading import load_config
from nemo_rl_moe.distributed.worker_group import WorkerGroup
from nemo_rl_moe.launch.early_start import IMPORTED_BY_WORKERS, EarlyCluster
from tests.functional import sft_runs

LIMIT_S = 300.0


class Rank:
    """A worker that does nothing."""

    def __init__(self, rank: int, world_size: int):
        pass


@pytest.mark.full
def test_workers_are_the_processes_that_have_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert all(map(find_spec, IMPORTED_BY_WORKERS))
    data = sft_runs.make_additions(tmp_path / "data", 256, 16)
    config = load_config(str(sft_runs.EXEMPLAR), sft_runs.settings(tmp_path, data))
    early = EarlyCluster(config)
    try:
        cluster = early.get()
        places = ray.get([process.place.remote() for process in cluster.started_processes], timeout=LIMIT_S)
        group = WorkerGroup(cluster, Rank, LIMIT_S, LIMIT_S)
        assert group.process_ids == [place.process.pid for place in places]
        assert len(places) == 2
        assert not cluster.started_processes, "another group starts its own"
        group.shutdown()
    finally:
        early.close()
    assert not ray.is_initialized()
