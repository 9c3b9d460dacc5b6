# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Signs that training on tokens of older weights goes wrong: their importance weight is unbounded, or lag costs more
samples than overlap gains."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from nemo_rl_moe.routing.findings.streaks import Streaks

StalenessKind = Literal["unbounded_staleness", "staleness_outweighs_overlap"]
UNBOUNDED_LAG = "train/by_lag/max_unbounded_lag"
"""Metric of losses without a bound on the importance weight of older tokens: largest lag of a token, in steps."""
EFFECTIVE_SAMPLES = "train/by_lag/effective_samples"
STEP_S, WAIT_S = "timing/step/seconds", "timing/generation/seconds"
"""Metrics: seconds of a step, and seconds of it in which training waits for rollouts."""
TRAINER_IDLE, ENGINES_IDLE = "train/rollouts/idle_share/trainer", "train/rollouts/idle_share/engines"
"""Metrics: shares of a step in which training waits for rollouts, and in which no engine generates. New after 0.2.0."""
METRICS = (UNBOUNDED_LAG, EFFECTIVE_SAMPLES, STEP_S, WAIT_S, TRAINER_IDLE, ENGINES_IDLE)
"""Keys that `StalenessSignal` reads."""


@dataclass(frozen=True)
class OverlapBalance:
    """Gain and cost of overlapping rollouts with training in one step: speedup, and loss of effective samples.

    Attributes:
        waiting: Share of the time in which training waits for rollouts.
        idle: Share of the time in which no engine generates.
        effective_samples: Effective sample size of the importance ratios of the trained tokens, as a share.
    """

    waiting: float
    idle: float
    effective_samples: float

    @property
    def most_speedup(self) -> float:
        """Largest possible speedup by overlap, `2 - waiting - idle`, because a step without overlap would take the
        working times of generation and of training one after the other. 1 means no overlap.
        """
        return max(1.0, 2 - self.waiting - self.idle)

    @property
    def pays(self) -> bool:
        """Whether overlap can have gained as many samples as the importance weights of older tokens lose."""
        return self.most_speedup * self.effective_samples >= 1


def overlap_balance(metrics: Mapping[str, float]) -> OverlapBalance | None:
    """Return the balance of a step. None if the step trains on no tokens of older weights."""
    if EFFECTIVE_SAMPLES not in metrics or STEP_S not in metrics:
        return None
    waiting = metrics.get(TRAINER_IDLE, metrics.get(WAIT_S, 0.0) / metrics[STEP_S])
    return OverlapBalance(waiting, metrics.get(ENGINES_IDLE, 0.0), metrics[EFFECTIVE_SAMPLES])


class StalenessSignal:
    """Detects training on tokens of older weights that should not be trained on. Steps are added in order.

    Args:
        unbounded_lag: Least lag, in steps, from which a loss without a bound on importance weights is reported. None:
            never.
        num_steps: Number of successive steps in which lag must cost more than overlap can have gained.
    """

    def __init__(self, unbounded_lag: int | None, num_steps: int):
        self._unbounded_lag, self._num_steps = unbounded_lag, num_steps
        self._streaks: Streaks[StalenessKind] = Streaks()

    def observe(self, step: int, metrics: Mapping[str, float]) -> Iterator[tuple[StalenessKind, int, str]]:
        """Add a step. Yield (condition, its first step, description) for each condition that has held long enough."""
        texts = dict(self._conditions(metrics))
        for kind, first, length in self._streaks.extend(step, texts):
            if kind == "unbounded_staleness" or length >= self._num_steps:
                yield kind, first, texts[kind].format(first)

    def _conditions(self, metrics: Mapping[str, float]) -> Iterator[tuple[StalenessKind, str]]:
        lag = metrics.get(UNBOUNDED_LAG)
        if self._unbounded_lag is not None and lag is not None and lag >= self._unbounded_lag:
            yield (
                "unbounded_staleness",
                f"tokens of weights {lag:.0f} optimizer steps old have been trained on since step {{}} by a loss that"
                " does not bound their weight: a few of them can decide an update; set"
                " loss_fn.importance_sampling_correction, or allow less lag",
            )
        balance = overlap_balance(metrics)
        if balance is not None and not balance.pays:
            yield (
                "staleness_outweighs_overlap",
                f"older tokens have cost more than overlap can have gained since step {{}}: each token counts as"
                f" {balance.effective_samples:.0%} of a fresh one, and the run is at most"
                f" {balance.most_speedup:.2f} times as fast as with alternating rollouts and updates",
            )
