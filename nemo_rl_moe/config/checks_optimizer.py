# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rules between settings of the optimizer. See `checks.py`."""

from collections.abc import Iterator
from typing import Any

from nemo_rl_moe.config.schema import MasterConfig

_OPTIMIZER = "policy.megatron_cfg.optimizer"
_PRECISION_AWARE = f"{_OPTIMIZER}.use_precision_aware_optimizer"


def learning_rates_fall(config: MasterConfig) -> Iterator[str]:
    """Check that the learning rate decays downwards, and after the warm-up."""
    optimizer, scheduler = config.policy.megatron_cfg.optimizer, config.policy.megatron_cfg.scheduler
    if optimizer.min_lr is not None and optimizer.min_lr > optimizer.lr:
        yield (
            f"{_OPTIMIZER}.min_lr: got {optimizer.min_lr}, expected at most optimizer.lr = {optimizer.lr}, or"
            " null for a tenth of it"
        )
    end = scheduler.lr_decay_iters
    if end is not None and scheduler.lr_warmup_iters >= end:
        yield (
            f"policy.megatron_cfg.scheduler.lr_warmup_iters: got {scheduler.lr_warmup_iters}, expected less than"
            f" scheduler.lr_decay_iters = {end}"
        )


def precision_aware_optimizer_is_possible(config: MasterConfig) -> Iterator[str]:
    """Check that a precision-aware optimizer is sharded, has bfloat16 weights, and is offloaded to CPUs if there is no
    Transformer Engine."""
    megatron = config.policy.megatron_cfg
    chosen = megatron.optimizer
    if not chosen.use_precision_aware_optimizer:
        return
    if not megatron.distributed_data_parallel_config.use_distributed_optimizer:
        yield (
            f"{_PRECISION_AWARE}: true needs"
            " policy.megatron_cfg.distributed_data_parallel_config.use_distributed_optimizer true"
        )
    if config.policy.precision != "bfloat16":
        yield f"{_PRECISION_AWARE}: true needs policy.precision bfloat16, got {config.policy.precision}"
    if config.cluster.gpus_per_node == 0 and not chosen.optimizer_cpu_offload:
        yield (
            f"{_PRECISION_AWARE}: true needs Transformer Engine's FusedAdam, which cluster.gpus_per_node 0 does not"
            f" have; expected false, or {_OPTIMIZER}.optimizer_cpu_offload=true"
        )


def settings_of_the_precision_aware_optimizer_are_read(config: MasterConfig) -> Iterator[str]:
    """Check that number formats of moments, and offload, are set only if the precision-aware optimizer reads them."""
    chosen = config.policy.megatron_cfg.optimizer
    is_on, is_offloaded = chosen.use_precision_aware_optimizer, chosen.optimizer_cpu_offload
    for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
        value: Any = getattr(chosen, name)
        if value == "float32":
            continue
        if not is_on:
            yield f"{_OPTIMIZER}.{name}: got {value}, expected float32 unless {_PRECISION_AWARE}=true"
        elif is_offloaded:
            yield (
                f"{_OPTIMIZER}.{name}: got {value}, expected float32 with {_OPTIMIZER}.optimizer_cpu_offload true,"
                " whose moments are float32"
            )
    if is_offloaded and not is_on:
        yield f"{_OPTIMIZER}.optimizer_cpu_offload: true needs {_PRECISION_AWARE}=true, which provides its gradients"
    if chosen.overlap_cpu_optimizer_d2h_h2d and not is_offloaded:
        yield (
            f"{_OPTIMIZER}.overlap_cpu_optimizer_d2h_h2d: got true, expected false unless"
            f" {_OPTIMIZER}.optimizer_cpu_offload=true"
        )


def late_weights_are_possible(config: MasterConfig) -> Iterator[str]:
    """Check that overlapped gathering of weights has the distributed optimizer and overlapped gradient reduction."""
    parallel = config.policy.megatron_cfg.distributed_data_parallel_config
    key = "policy.megatron_cfg.distributed_data_parallel_config"
    if parallel.overlap_param_gather and not (parallel.use_distributed_optimizer and parallel.overlap_grad_reduce):
        yield f"{key}.overlap_param_gather: true needs {key}: use_distributed_optimizer true, overlap_grad_reduce true"


OPTIMIZER_RULES = (
    late_weights_are_possible,
    learning_rates_fall,
    precision_aware_optimizer_is_possible,
    settings_of_the_precision_aware_optimizer_are_read,
)
