# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Gain of a run from rollouts that overlap with training, and the cost of this, as tokens are from older weights."""

from statistics import fmean

from nemo_rl_moe.routing.findings.staleness_signal import METRICS, OverlapBalance, overlap_balance
from nemo_rl_moe.runs.folder.run_data import RunData

NUM_STEPS = 20
"""Number of last steps over which numbers are averaged."""


def overlap_facts(run: RunData) -> list[tuple[str, str]]:
    """Return (label, value) pairs on gain and cost of overlapping rollouts and training. Empty without overlap."""
    balances = _last_balances(run)
    if not balances:
        return []
    mean = OverlapBalance(
        fmean(balance.waiting for balance in balances),
        fmean(balance.idle for balance in balances),
        fmean(balance.effective_samples for balance in balances),
    )
    return [
        ("training waits for rollouts", f"{mean.waiting:.0%} of the time"),
        ("engines idle", f"{mean.idle:.0%}"),
        ("speedup by overlap", f"at most {mean.most_speedup:.2f}"),
        ("effective samples", f"{mean.effective_samples:.0%}"),
        ("overlap", "pays" if mean.pays else "costs more than it gains"),
    ]


def _last_balances(run: RunData) -> list[OverlapBalance]:
    values = {
        key: dict(zip(series.steps.tolist(), series.values.tolist(), strict=True))
        for key in METRICS
        if (series := run.metrics.get(key)) is not None
    }
    steps = sorted({step for of_steps in values.values() for step in of_steps})[-NUM_STEPS:]
    found = (overlap_balance({key: of[step] for key, of in values.items() if step in of}) for step in steps)
    return [balance for balance in found if balance is not None]
