# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rules between settings of the optimizer: each broken once, reported in one line."""

import pytest

from nemo_rl_moe.config.loading import load_config
from tests.unit.config.conftest import Problems, about_keys

O = "policy.megatron_cfg.optimizer"  # noqa: E741
AWARE, OFFLOAD = f"{O}.use_precision_aware_optimizer=true", f"{O}.optimizer_cpu_offload=true"
BFLOAT16 = "policy.precision=bfloat16"
DDP = "policy.megatron_cfg.distributed_data_parallel_config"
SHARDED = f"{DDP}.use_distributed_optimizer=true"
GPUS = ("cluster.gpus_per_node=8", "policy.train_global_batch_size=512")


REFUSED = {
    f"{O}.exp_avg_dtype=bfloat16": f"got bfloat16, expected float32 unless {O}.use_precision_aware_optimizer=true",
    OFFLOAD: f"true needs {O}.use_precision_aware_optimizer=true, which provides its gradients",
    f"{O}.overlap_cpu_optimizer_d2h_h2d=true": f"got true, expected false unless {O}.optimizer_cpu_offload=true",
    f"{O}.optimizer_offload_fraction=0": "got 0 (int), expected a number above 0 and up to 1",
}
REFUSED_TOGETHER: dict[tuple[str, ...], str] = {
    (AWARE, BFLOAT16, SHARDED): f"{O}.use_precision_aware_optimizer: true needs Transformer Engine's FusedAdam, which"
    f" cluster.gpus_per_node 0 does not have; expected false, or {O}.optimizer_cpu_offload=true",
    (AWARE, SHARDED, *GPUS, "policy.precision=float32"): f"{O}.use_precision_aware_optimizer: true needs"
    " policy.precision bfloat16, got float32",
    (AWARE, OFFLOAD, BFLOAT16, SHARDED.replace("true", "false")): f"{O}.use_precision_aware_optimizer: true needs"
    " policy.megatron_cfg.distributed_data_parallel_config.use_distributed_optimizer true",
    (AWARE, OFFLOAD, BFLOAT16, SHARDED, f"{O}.exp_avg_sq_dtype=bfloat16"): f"{O}.exp_avg_sq_dtype: got bfloat16,"
    f" expected float32 with {O}.optimizer_cpu_offload true, whose moments are float32",
    (f"{DDP}.overlap_param_gather=true", f"{DDP}.overlap_grad_reduce=true"): f"{DDP}.overlap_param_gather: true needs"
    f" {DDP}: use_distributed_optimizer true, overlap_grad_reduce true",
}


@pytest.mark.parametrize(
    ("overrides", "line"), [*(((override,), line) for override, line in about_keys(REFUSED)), *REFUSED_TOGETHER.items()]
)
def test_broken_rule_gives_its_one_line(problems_of: Problems, overrides: tuple[str, ...], line: str) -> None:
    assert problems_of(*overrides) == [line]


@pytest.mark.parametrize(
    "overrides",
    [
        (AWARE, BFLOAT16, SHARDED, *GPUS, f"{O}.exp_avg_dtype=bfloat16"),
        (AWARE, OFFLOAD, BFLOAT16, SHARDED, f"{O}.overlap_cpu_optimizer_d2h_h2d=true"),
    ],
)
def test_what_works_is_let_through(overrides: tuple[str, ...]) -> None:
    assert load_config("sft_tiny_moe.yaml", overrides, check_paths=False).policy.precision == "bfloat16"
