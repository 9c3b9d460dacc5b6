# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Choice of the best checkpoints by a metric, and of the ones to remove."""

import math
from collections.abc import Callable, Mapping, Sequence

from nemo_rl_moe.config.schema_run import CheckpointingConfig
from nemo_rl_moe.config.suggestions import did_you_mean, nearest


class BestMetric:
    """Metric by which the best checkpoints are kept. Warns once if a step does not report this metric."""

    def __init__(self, settings: CheckpointingConfig, warn: Callable[[str], None]):
        self._settings = settings
        self._warn = warn
        self._has_reported = False

    def value(self, step: int, metrics: Mapping[str, float]) -> float | None:
        """Return the metric's value at a step, or None if `metrics` (keys such as `val/accuracy`) lacks it."""
        name = self._settings.metric_name
        if name is None:
            return None
        source, _, rest = name.partition(":")
        value = metrics.get(f"{source}/{rest}")
        if value is not None:
            return float(value)
        if self._settings.keep_top_k is not None and not self._has_reported:
            measured = [f"{source}:{key.removeprefix(f'{source}/')}" for key in metrics if key.startswith(f"{source}/")]
            if measured:  # otherwise the step has no validation, which the run has reported at its start
                self._has_reported = True
                self._warn(
                    f"checkpointing.metric_name: {name} is not among the metrics of step {step}, so that its checkpoint"
                    f" ranks below those that have it{did_you_mean(nearest(name, measured))}"
                )
        return None


def choice_in_force(settings: CheckpointingConfig, metric: str | None, *, validates: bool) -> CheckpointingConfig:
    """Return the settings with `metric` as `metric_name`, or None if `metric` needs a validation and the run has none.

    Args:
        metric: Metric that the configuration chooses, with `auto` resolved (`config.algorithm.metric_in_force`).
    """
    is_measured = validates or metric is None or not metric.startswith("val:")
    return settings.model_copy(update={"metric_name": metric if is_measured else None})


def steps_to_remove(
    checkpoints: Sequence[tuple[int, float | None]], keep_top_k: int | None, *, higher_is_better: bool
) -> list[int]:
    """Return the steps, ascending, whose checkpoints are neither among the best nor the newest.

    A checkpoint without a value, or with NaN, ranks below all others. Of equals, the newer one ranks higher.

    Args:
        keep_top_k: Number of best checkpoints. None to keep all.
    """
    if keep_top_k is None or not checkpoints:
        return []

    def rank(checkpoint: tuple[int, float | None]) -> tuple[bool, float, int]:
        step, value = checkpoint
        if value is None or math.isnan(value):
            return (False, 0.0, step)
        return (True, value if higher_is_better else -value, step)

    best = sorted(checkpoints, key=rank, reverse=True)[:keep_top_k]
    kept = {step for step, _ in best} | {max(step for step, _ in checkpoints)}
    return sorted(step for step, _ in checkpoints if step not in kept)
