# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Charts of training on tokens of older weights: how old they are, and what that does to them."""

from functools import partial

from nemo_rl_moe.runs.report.chart import Chart

STALENESS = "Staleness of the rollouts"
_staleness = partial(Chart, STALENESS)

STALENESS_CHARTS = (
    _staleness(
        "Lag of the tokens",
        "Optimizer steps from the weights that sampled a token to those that are trained on it. Healthy: flat, and the "
        "largest well within the limit of the configuration.",
        {"train/by_lag/mean_lag": "mean", "train/by_lag/max_lag": "largest"},
        from_zero=True,
    ),
    _staleness(
        "Age of the groups",
        "Optimizer steps of the groups of a step since their dispatch, while they were generated and in the queue. "
        "Healthy: flat. In the queue: rollouts are faster than training.",
        {"train/staleness/*": None},
        from_zero=True,
    ),
    _staleness(
        "Tokens by lag",
        "Trained tokens of each class of lag. Healthy: most of the smallest lags that keep the trainer busy.",
        {"train/by_lag/*/num_valid_tokens": None},
        from_zero=True,
    ),
    _staleness(
        "Mismatch by lag",
        "Estimate of the divergence between the rollout's and training's log-probabilities. Lag 0 is the difference of "
        "the engines, and healthy if small; older tokens are above it.",
        {"train/by_lag/*/gen_kl_error": None},
        from_zero=True,
    ),
    _staleness(
        "Mismatch by staleness alone",
        "The same beyond that of tokens without lag. Healthy: it grows with the lag and is flat over the steps. One "
        "that grows with the steps while the lag does not: the engines do not get the weights.",
        {"train/by_lag/*/kl_staleness": None},
        from_zero=True,
    ),
    _staleness(
        "Effective samples by lag",
        "Share of the tokens that are left when each counts by its importance ratio. Healthy: close to 1; at 0.5 half "
        "of the rollouts are lost.",
        {"train/by_lag/effective_samples": "all", "train/by_lag/*/effective_samples": None},
        (1.0, "none lost"),
    ),
    _staleness(
        "Clipped tokens by lag",
        "Share of the tokens whose ratio the loss replaces by a bound. Healthy: some hundredths, more of older tokens.",
        {"train/by_lag/*/clip_fraction": None},
        from_zero=True,
    ),
    _staleness(
        "Agreement with the rollouts by lag",
        "Share of the rows (a token in a layer) for which the routers would choose the experts that the rollout took. "
        "Healthy: it falls slowly with the lag, and is flat over the steps.",
        {"train/moe/routing/live_agreement_lag_*": None},
    ),
)
