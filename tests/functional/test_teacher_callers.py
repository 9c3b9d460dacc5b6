# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Two callers of one teacher at a time: its ranks get their calls in the same order, and each its own numbers."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_moe.config.loading import load_config_as
from nemo_rl_moe.config.schema_distillation import DistillationMasterConfig
from nemo_rl_moe.distributed.cluster import RayCluster
from nemo_rl_moe.models.candidates import CANDIDATE_IDS, candidate_column
from nemo_rl_moe.models.hf_files import ModelSource
from nemo_rl_moe.models.policy.model_workers import ModelWorkers
from tests.functional import sft_runs
from tests.functional.test_distillation_run import EXEMPLAR, TP2
from tests.support.golden_runs import make_moe_teacher
from tests.support.grpo_inputs import cluster_config
from tests.support.tiny_model import tiny_batch

pytestmark = [pytest.mark.shared_ray, pytest.mark.full]


class SlowToReachTheSecond(list[Any]):
    """Workers of which a caller reaches the second a while behind the first."""

    def __getitem__(self, index: Any) -> Any:
        if index == 1:
            time.sleep(0.1)
        return super().__getitem__(index)


def test_calls_of_two_threads_come_in_one_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    folder = make_moe_teacher(tmp_path / "teacher", sft_runs.MODEL)
    overrides = [f"{key}={str(value).lower()}" for key, value in TP2.items()]
    config = load_config_as(
        DistillationMasterConfig,
        EXEMPLAR,
        [*overrides, f"policy.model_name={sft_runs.MODEL}", f"distillation.teachers.teacher.model_name={folder}"],
        check_paths=False,
    )
    policy = config.distillation.teachers["teacher"].as_policy(config.policy)
    cluster = RayCluster(cluster_config(1, 0, 2))
    teacher = ModelWorkers("teacher", policy, cluster, source=ModelSource(folder, None))
    try:
        batches = [tiny_batch(seed, vocabulary_size=45) for seed in range(2)]
        ids = [torch.rand(*batch.input_ids.shape, 45).topk(4).indices for batch in batches]
        asked = [
            batch.with_columns(**{CANDIDATE_IDS: candidate_column(of_batch)})
            for batch, of_batch in zip(batches, ids, strict=True)
        ]
        alone = [teacher.start_candidate_logprobs(batch)() for batch in asked]
        assert not torch.equal(*alone)
        workers = teacher._workers
        monkeypatch.setattr(workers, "_actors", SlowToReachTheSecond(workers._actors))
        found: list[list[torch.Tensor]] = [[], []]

        def call(caller: int) -> None:
            for _ in range(3):
                found[caller].append(teacher.start_candidate_logprobs(asked[caller])())

        threads = [threading.Thread(target=call, args=(caller,)) for caller in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for caller in range(2):
            assert len(found[caller]) == 3
            assert all(torch.equal(each, alone[caller]) for each in found[caller])
    finally:
        teacher.shutdown()
        cluster.shutdown()
