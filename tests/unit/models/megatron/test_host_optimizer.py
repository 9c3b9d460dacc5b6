# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Optimizer on the host (`optimizer_cpu_offload`): the numbers of a run without it, resumed to the bit."""

from pathlib import Path
from typing import Any

import pytest

from nemo_rl_moe.models.megatron.checkpoint.inner_optimizers import inner_optimizers, optimizer_parts
from tests.support.checkpoint_run import load_and_train, train_and_save
from tests.support.gloo_ranks import run_ranks
from tests.support.quick_list import slow
from tests.support.tiny_model import parallel_job, tiny_policy
from tests.support.training_run import RunSettings, build_trainer

# Clipping rounds gradients in bfloat16 buffers, and in float32 copies of them not.
COMMON = {
    "precision": "bfloat16",
    "distributed_data_parallel_config__use_distributed_optimizer": True,
    "distributed_data_parallel_config__grad_reduce_in_fp32": True,
}
OFFLOAD = {"optimizer__use_precision_aware_optimizer": True, "optimizer__optimizer_cpu_offload": True}


def settings(world_size: int, **changes: Any) -> RunSettings:
    return RunSettings(tiny_policy(world_size, **COMMON, **changes))


def shares_on_the_host(job: RunSettings) -> list[float]:
    """Share of each part's parameters that lie on the host; each parameter has one inner optimizer."""
    with parallel_job(job.policy):
        shares = []
        for part in optimizer_parts(build_trainer(job.policy, job.model).optimizer):
            mine = sum(p.numel() for group in part.optimizer.param_groups for p in group["params"])
            inner = [p for one in inner_optimizers(part) for group in one.param_groups for p in group["params"]]
            assert sum(p.numel() for p in inner) == mine
            shares.append(sum(p.numel() for p in part.optimizer.gpu_params_map_cpu_copy) / mine)
        return shares


@pytest.mark.full
@pytest.mark.parametrize(("fraction", "overlap"), [(1.0, True), slow(0.5, False)], ids=["all", "half"])
def test_offloaded_steps_are_those_without(tmp_path: Path, fraction: float, overlap: bool) -> None:
    folders = [tmp_path / name for name in ("plain", "offloaded")]
    for folder in folders:
        folder.mkdir()
    chosen = {"optimizer__optimizer_offload_fraction": fraction, "optimizer__overlap_cpu_optimizer_d2h_h2d": overlap}
    plain, offloaded = settings(2), settings(2, **OFFLOAD, **chosen)
    whole, saved = (
        run_ranks(train_and_save, 2, job, str(folder), 1, 3)[0]
        for job, folder in zip((plain, offloaded), folders, strict=True)
    )
    assert saved == whole
    assert whole[0]["loss"] != whole[2]["loss"]
    # Its checkpoints are those of any other optimizer, both ways.
    for job, folder in ((offloaded, folders[1]), (plain, folders[1]), (offloaded, folders[0])):
        assert run_ranks(load_and_train, 2, job, str(folder), 1, 3)[0] == whole[1:]
    for shares in run_ranks(shares_on_the_host, 2, offloaded):
        assert all(fraction <= share <= min(1.0, fraction + 0.35) for share in shares)
