# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What W&B is told about the charts of a run.

W&B makes a chart of each key, in a section named after what stands before the key's first slash: `train`, `val`,
`timing`, `pictures`. Their axis is the optimizer step, at which rows are logged.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from nemo_rl_moe.moe.metric_keys import OUTLIER_PREFIX

_OUTLIERS = f"train/{OUTLIER_PREFIX}"
OUTLIER_CHART_KEY = "pictures/expert_utilization_outliers"
# Of a table with more, W&B shows the first ones alone.
_MOST_ROWS = 10_000

# What the table of runs shows of a metric besides its last value.
_BEST_AND_LAST = {
    "min,last": ("train/loss", "val/loss", "train/moe/expert_utilization_min", "train/moe/expert_diversity_min"),
    "max,last": (
        "train/accuracy",
        "train/reward",
        "val/accuracy",
        "val/reward",
        "train/grad_norm",
        "train/skipped_updates",
        "train/moe/cv_excess_mean",
        "train/moe/dead_expert_frac_mean",
        "train/moe/max_violation_max",
        "train/moe/avg_overload_factor",
        "train/moe/max_overload_factor",
        "train/moe/max_cum_overload_factor",
    ),
}


def define_charts(run: Any, has_outlier_chart: bool) -> None:
    """Sets up the charts of a W&B run.

    Args:
        run: The run.
        has_outlier_chart: Whether the outliers get a chart together, in place of one for each expert.
    """
    for summary, keys in _BEST_AND_LAST.items():
        for key in keys:
            run.define_metric(key, summary=summary)
    # At other steps other experts: a chart of each would be hundreds, most of them with one point. Those that have
    # been the most or the least loaded are on one chart instead, and W&B keeps each of them to be looked up.
    if has_outlier_chart:
        run.define_metric(f"{_OUTLIERS}*", hidden=True)


class OutlierChart:
    """The most and the least loaded experts of each step, on one chart."""

    def __init__(self) -> None:
        self._rows: deque[tuple[int, float, str]] = deque(maxlen=_MOST_ROWS)

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes the outliers of a step."""
        for key, value in metrics.items():
            if key.startswith(_OUTLIERS):
                self._rows.append((step, value, key.removeprefix(_OUTLIERS)))

    @property
    def rows(self) -> Iterable[tuple[int, float, str]]:
        """Step, load over fair share, and whose: `layer_3_expert_17`; of a long run, the latest."""
        return tuple(self._rows)

    def draw(self) -> Mapping[str, Any]:
        """The chart as W&B takes it; empty while there are no outliers."""
        if not self._rows:
            return {}
        import wandb

        table = wandb.Table(columns=["step", "utilization", "expert"], data=[list(row) for row in self._rows])
        title = "Most and least loaded experts: load over fair share"
        return {OUTLIER_CHART_KEY: wandb.plot.line(table, "step", "utilization", stroke="expert", title=title)}
