# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Charts of metrics in a report; each caption says what healthy looks like."""

import re
from collections.abc import Iterable
from dataclasses import asdict
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from nemo_rl_moe.runs.report.chart import Chart, Line
from nemo_rl_moe.runs.report.modality_charts import MODALITY_CHARTS
from nemo_rl_moe.runs.report.reward_charts import REWARD_CHARTS
from nemo_rl_moe.runs.report.routing_charts import ROUTING_CHARTS

TRAINING, BALANCE = "Training", "Balance of the experts"
_training = partial(Chart, TRAINING)
_balance = partial(Chart, BALANCE)
_PER_LAYER = re.compile(r"_layer_\d+")

_TRAINING_CHARTS = (
    _training(
        "Loss",
        "Healthy: supervised losses fall and flatten, on validation too; a policy-gradient loss says "
        "little: look at the reward.",
        [Line("train/loss", "training"), Line("val/loss", "validation")],
    ),
    _training(
        "Gradient norm",
        "Before clipping. Healthy: it settles after the warmup; single spikes are normal, growth is not.",
        [Line("train/grad_norm", "gradient norm")],
        from_zero=True,
    ),
    _training(
        "Seconds of each phase",
        "How long each phase of a step takes. Healthy: flat; imbalance between ranks shows here as longer training.",
        [Line("timing/*/seconds", None)],
        from_zero=True,
    ),
    _training(
        "Tokens a second",
        "Speed of each phase. Healthy: flat, apart from the first steps.",
        [Line("timing/*/tokens_per_second", None)],
        from_zero=True,
    ),
    _balance(
        "Spread of the expert loads (cv)",
        "Standard deviation of the loads over their mean, average of the layers, beside what random routing of the "
        "same tokens would have. Healthy: it falls towards that line.",
        [
            Line("train/moe/cv_mean", "cv"),
            Line("train/moe/cv_null_mean", "by chance"),
            Line("train/moe/cv_excess_mean", "beyond chance"),
        ],
        from_zero=True,
    ),
    _balance(
        "Overload of the busiest rank",
        "Work of the busiest expert-parallel rank over that of the mean one; the others wait for it. Healthy: near 1.",
        [Line("train/moe/avg_overload_factor", "average"), Line("train/moe/max_overload_factor", "worst microbatch")],
        (1.0, "no waiting"),
    ),
    _balance(
        "Auxiliary losses",
        "What the optimizer sees of balance, before coefficients. Healthy: load balancing losses settle near 1.",
        [
            Line("train/moe/load_balancing_loss", "load balancing"),
            Line("train/moe/seq_load_balancing_loss", "load balancing, by sequence"),
            Line("train/moe/global_load_balancing_loss", "load balancing, global"),
            Line("train/moe/z_loss", "z-loss"),
        ],
        (1.0, "perfect balance"),
    ),
    _balance(
        "Dead experts",
        "Share of the experts that got no token in a step, average of the layers. Healthy: 0.",
        [Line("train/moe/dead_expert_frac_mean", "dead experts")],
        from_zero=True,
    ),
)


def charts_of(keys: Iterable[str]) -> list[dict[str, Any]]:
    """Return the charts that have any of these metrics, as the page's script reads them."""
    in_order = sorted(keys)
    found = []
    for chart in (*REWARD_CHARTS, *_TRAINING_CHARTS, *ROUTING_CHARTS, *MODALITY_CHARTS):
        lines = [
            {"key": key, "label": line.label if line.label is not None else _wildcard(key, line.pattern)}
            for line in chart.lines
            for key in in_order
            if fnmatchcase(key, line.pattern) and not (line.label is None and _PER_LAYER.search(key))
        ]
        if lines:
            found.append({**asdict(chart), "lines": lines})
    return found


def _wildcard(key: str, pattern: str) -> str:
    before, *_, after = pattern.split("*")
    return key.removeprefix(before).removesuffix(after)
