# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The table of metrics in `docs/staleness-metrics.md` against what a step with every class of lag reports."""

import torch

from nemo_rl_moe.algorithms.lag_metrics import LagMetrics
from nemo_rl_moe.algorithms.step_metrics import training_metrics
from nemo_rl_moe.metrics import MetricSeries, PhaseClock
from nemo_rl_moe.models.interfaces import TrainResult
from nemo_rl_moe.routing.agreement.lag_agreement import lag_agreement_metrics
from nemo_rl_moe.token_lag import LAG_CLASSES
from tests.unit.algorithms.policy_loss_reference import random_inputs
from tests.unit.algorithms.test_lag_metrics import random_lags, series_of, with_lags
from tests.unit.test_docs_examples import DOCS, documented_keys
from tests.unit.test_docs_grpo_metrics import unfolded


def reported() -> set[str]:
    inputs = random_inputs(0, sequences=12, targets=9)
    series: dict[str, MetricSeries] = series_of(with_lags(inputs, random_lags(inputs, 0)))
    agreement = lag_agreement_metrics(torch.ones(len(LAG_CLASSES), 2, dtype=torch.long))
    result = TrainResult(0.0, 0.0, 0.0, 1, 1, series, agreement)
    observed = LagMetrics(lambda name, table: None).after_update(result, PhaseClock())
    return {key for key in training_metrics(result, observed) if "lag" in key}


def test_table_has_every_metric_by_lag_and_no_other() -> None:
    table = {key for cell in documented_keys(DOCS / "staleness-metrics.md") for key in unfolded(cell)}
    table = {key for key in table if key.startswith("train/")}
    of_classes = {key.replace("{lag}", name) for key in table for name in LAG_CLASSES}
    # Tokens without a lag have no part that comes from staleness.
    assert of_classes - {"train/by_lag/0/kl_staleness"} == reported()
