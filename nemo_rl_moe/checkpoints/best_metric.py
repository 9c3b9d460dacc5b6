# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The best checkpoints by a metric, and those to remove."""

import math
from collections.abc import Callable, Mapping, Sequence

from nemo_rl_moe.config.schema_run import CheckpointingConfig
from nemo_rl_moe.config.suggestions import did_you_mean, nearest


class BestMetric:
    """Metric by which the best checkpoints are kept, with one warning where a wrong name or period leaves it out.

    Args:
        settings: The `checkpointing` section.
        warn: Receives the warning.
    """

    def __init__(self, settings: CheckpointingConfig, warn: Callable[[str], None]):
        self._settings = settings
        self._warn = warn
        self._has_told = False

    def value(self, step: int, metrics: Mapping[str, float], *, is_due: bool) -> float | None:
        """Value of the metric at a step; None where it was not measured.

        Args:
            step: Steps done.
            metrics: The step's, by complete key such as `val/accuracy`.
            is_due: The checkpoint is one of `save_period`, and not of a run that stops.
        """
        name = self._settings.metric_name
        if name is None:
            return None
        source, _, rest = name.partition(":")
        value = metrics.get(f"{source}/{rest}")
        if value is not None:
            return float(value)
        if self._settings.keep_top_k is not None and not self._has_told:
            measured = [f"{source}:{key.removeprefix(f'{source}/')}" for key in metrics if key.startswith(f"{source}/")]
            if measured or is_due:
                self._has_told = True
                self._warn(self._missing(name, step, measured))
        return None

    def _missing(self, name: str, step: int, measured: list[str]) -> str:
        ranks = "its checkpoint ranks below those that have it"
        if measured:
            return (
                f"checkpointing.metric_name: {name} is not among the metrics of step {step}, so that {ranks}"
                f"{did_you_mean(nearest(name, measured))}"
            )
        return (
            f"checkpointing.save_period: {self._settings.save_period} saves at step {step}, where there is no {name},"
            f" so that {ranks}; expected a multiple of the algorithm's val_period"
        )


def steps_to_remove(
    checkpoints: Sequence[tuple[int, float | None]], keep_top_k: int | None, *, higher_is_better: bool
) -> list[int]:
    """Steps whose checkpoints are neither among the best nor the newest.

    A checkpoint without a value, or whose value is NaN, ranks below all that have one. Of equals, the newer one ranks
    higher.

    Args:
        checkpoints: Step and metric of each; each step once.
        keep_top_k: How many of the best to keep; None: all.
        higher_is_better: Whether more of the metric is better.

    Returns:
        Ascending steps.
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
