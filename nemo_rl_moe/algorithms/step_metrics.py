# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Metrics of a step for all algorithms. Only this module reduces series of metrics and adds prefixes."""

from collections.abc import Mapping
from types import MappingProxyType

from nemo_rl_moe.metrics import MetricSeries, PhaseClock, Reduction, with_prefix
from nemo_rl_moe.models.interfaces import TrainResult
from nemo_rl_moe.routing.metrics.metric_keys import ROLLOUT_PREFIX, with_moe_prefix


def training_metrics(
    result: TrainResult,
    further: Mapping[str, float] = MappingProxyType({}),
) -> dict[str, float]:
    """Return the metrics of one `train` call as `train/...`, and the rollout's load as `rollout/moe/...`.

    A step without an update has only `further`.

    Args:
        further: Metrics of the algorithm and its observers, without the prefix `train/`.
    """
    if not result.num_updates:
        return with_prefix("train", further)
    metrics = {
        "loss": result.global_loss,
        "grad_norm": result.grad_norm,
        "lr": result.lr,
        "num_microbatches": float(result.num_microbatches),
        "num_tokens": float(result.num_tokens),
        "skipped_updates": float(result.num_skipped_updates),
    }
    # The result already has the loss.
    metrics |= _reduced({name: series for name, series in result.microbatch_metrics.items() if name != "loss"})
    of_rollout = {key: value for key, value in result.moe_metrics.items() if key.startswith(ROLLOUT_PREFIX)}
    metrics |= with_moe_prefix({key: value for key, value in result.moe_metrics.items() if key not in of_rollout})
    return with_prefix("train", {**metrics, **further}) | of_rollout


def performance_metrics(result: TrainResult, clock: PhaseClock) -> dict[str, float]:
    """Return metrics of the use of GPUs in a step, as `performance/...` keys with NeMo-RL's names. Empty on CPUs.

    Args:
        result: Result of the step's `train` call.
        clock: Clock with the phases `step` (the entire step) and `train`. A phase that was not timed has no metrics.
    """
    use = result.gpu_use
    if use is None:
        return {}
    metrics = _reduced(use.memory)
    if seconds := clock.seconds("step"):
        metrics["tokens_per_sec_per_gpu"] = result.num_tokens / seconds / use.num_gpus_of_run
    if seconds := clock.seconds("train"):
        metrics["policy_training_tokens_per_sec_per_gpu"] = result.num_tokens / seconds / use.num_gpus
        metrics["train_tflops_per_gpu"] = use.train_flops / seconds / use.num_gpus / 1e12
        if use.peak_flops_per_second is not None:
            metrics["train_fp_utilization"] = use.train_flops / seconds / use.peak_flops_per_second
    return with_prefix("performance", metrics)


def validation_metrics(series: Mapping[str, MetricSeries]) -> dict[str, float]:
    """Return the metrics of one validation, as `val/...` keys."""
    return with_prefix("val", _reduced(series))


def _reduced(series: Mapping[str, MetricSeries]) -> dict[str, float]:
    return {name: values.reduce() for name, values in series.items() if values.reduction is not Reduction.PART}
