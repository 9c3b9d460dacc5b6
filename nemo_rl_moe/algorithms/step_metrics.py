# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""One step's numbers, merged once for all algorithms: the only place that reduces series and adds `moe/`."""

from collections.abc import Mapping
from types import MappingProxyType

from nemo_rl_moe.metrics import MetricSeries, with_prefix
from nemo_rl_moe.models.interfaces import EvaluationResult, TrainResult
from nemo_rl_moe.moe.metric_keys import with_moe_prefix


def training_metrics(
    result: TrainResult,
    further: Mapping[str, float] = MappingProxyType({}),
    routing: Mapping[str, float] = MappingProxyType({}),
) -> dict[str, float]:
    """Metrics of one `train` call, as `train/...` keys.

    Args:
        result: The call's result.
        further: What the algorithm itself measured of the step, without a prefix.
        routing: The same of the model's routing, which goes among the MoE metrics.
    """
    metrics = {
        "loss": result.global_loss,
        "grad_norm": result.grad_norm,
        "lr": result.lr,
        "num_microbatches": float(result.num_microbatches),
        "num_tokens": float(result.num_tokens),
        "skipped_updates": float(result.num_skipped_updates),
    }
    # The loss is in the result already, as the mean over the global batches of the call.
    series = {name: values for name, values in result.microbatch_metrics.items() if name != "loss"}
    metrics |= _reduced(series)
    metrics |= with_moe_prefix({**result.moe_metrics, **routing})
    return with_prefix("train", {**metrics, **further})


def validation_metrics(result: EvaluationResult) -> dict[str, float]:
    """Metrics of one validation, as `val/...` keys."""
    return with_prefix("val", _reduced(result.microbatch_metrics))


def _reduced(series: Mapping[str, MetricSeries]) -> dict[str, float]:
    return {name: values.reduce() for name, values in series.items()}
