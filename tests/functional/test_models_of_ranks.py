# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Machines that do not find the same model: reported at once with the reason, while the other workers wait."""

import os
import shlex
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from nemo_rl_moe.config.loading import load_config
from nemo_rl_moe.distributed.cluster import RayCluster
from nemo_rl_moe.errors import ConfigurationError, WorkerDiedError
from nemo_rl_moe.launch.setup import fetch_on_machines
from nemo_rl_moe.models.hf_files import HubModel, ModelSource
from nemo_rl_moe.models.policy.lm_policy import MegatronPolicy
from tests.functional import sft_runs
from tests.support.grpo_inputs import cluster_config

pytestmark = pytest.mark.shared_ray


@dataclass(frozen=True)
class OtherOnRank1(ModelSource):
    """Rank 1 finds another folder, or none.

    Attributes:
        other: That of rank 1.
    """

    other: Path | None = None

    def folder(self) -> Path:
        assert self.local is not None
        if os.environ.get("RANK", "0") == "0":  # the driver has none
            return self.local
        if self.other is None:
            raise ConfigurationError("policy.model_name: this machine cannot reach the hub")
        return self.other


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        cluster = RayCluster(cluster_config(1, 0, 2))
        yield cluster
        cluster.shutdown()


def start(cluster: RayCluster, other: Path | None) -> None:
    config = load_config(sft_runs.EXEMPLAR, [f"policy.model_name={sft_runs.MODEL}"], check_paths=False)
    MegatronPolicy(
        config, cluster, seed=1, num_steps=1, source=OtherOnRank1(sft_runs.MODEL, None, other), model_files={}
    ).shutdown()


@pytest.mark.full
def test_a_rank_that_cannot_read_the_model_says_why(cluster: RayCluster) -> None:
    with pytest.raises(WorkerDiedError, match=r"worker rank 1 .* raised ConfigurationError while starting") as caught:
        start(cluster, None)
    assert "policy.model_name: this machine cannot reach the hub" in str(caught.value)


@pytest.mark.slow
def test_a_rank_with_another_model_is_found_by_all(cluster: RayCluster, tmp_path: Path) -> None:
    other = sft_runs.make_model_folder(tmp_path / "other", num_experts_per_tok=1)
    with pytest.raises(ConfigurationError) as caught:
        start(cluster, other)
    assert caught.value.problems == [
        f"policy.model_name: {other}: rank 1 finds another config.json than rank 0 ({sft_runs.MODEL}); all ranks must "
        "read the same model"
    ]


def test_machines_fetch_before_the_workers_start(cluster: RayCluster) -> None:
    assert cluster.call_on_each_machine(shlex.quote, "a b") == ["'a b'"]
    with pytest.raises(WorkerDiedError, match="`copyfile` on the machines of the run: ") as caught:
        cluster.call_on_each_machine(shutil.copyfile, "/nothing", "/nowhere")
    assert "FileNotFoundError" in str(caught.value)
    with pytest.raises(ConfigurationError) as refused:
        fetch_on_machines(cluster, HubModel("no//name", "0" * 40, ("config.json",)))
    (line,) = refused.value.problems
    assert line.startswith(
        "policy.model_name: got 'no//name', which is no folder here, and config.json of it cannot be"
    )
    assert line.endswith(f" (on {socket.gethostname()})")
