# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a run's routing, in words. Fed step by step, so that a run can be told of it while it goes on.

A finding is an episode: it begins when something has been wrong for so many steps in a row, and ends at the first step
at which it is not. Chance is not a finding: a router that sends tokens to experts at random, layer by layer, has none.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from jaxtyping import Int

from nemo_rl_moe.report.load_statistics import coefficient_of_variation, dead, null_coefficient_of_variation

FindingKind = Literal["dead_experts", "imbalance", "overload", "skipped_updates", "forced_routing"]
CHANCE = 1e-3
"""A finding of dead experts needs to be less probable than this for a router that chooses at random."""


@dataclass(frozen=True)
class Thresholds:
    """From where on something is a finding. Of each, None: never.

    Attributes:
        dead_expert_steps: Steps in a row that an expert gets no token.
        excess_cv: Imbalance of a layer beyond sampling noise, `sqrt(cv^2 - cv_null^2)`.
        overload_factor: Work of the busiest expert-parallel rank over the mean one's, `avg_overload_factor`.
        sustained_steps: Steps in a row that the last two must be above their thresholds.
    """

    dead_expert_steps: int | None
    excess_cv: float | None
    overload_factor: float | None
    sustained_steps: int


@dataclass(frozen=True)
class Finding:
    """One episode.

    Attributes:
        kind: What is wrong.
        layer: Index of the layer in the whole model; None: the whole model.
        first_step: Since when.
        last_step: Until when, so far.
        is_over: Whether it has ended.
        text: In words, without markup.
    """

    kind: FindingKind
    layer: int | None
    first_step: int
    last_step: int
    is_over: bool
    text: str

    @property
    def key(self) -> tuple[str, int | None]:
        """Where it is; at most one finding of a key goes on at a time."""
        return self.kind, self.layer


@dataclass(frozen=True)
class StepObservation:
    """What is known of one step.

    Attributes:
        step: The step.
        metrics: Complete key to value, `train/moe/...`.
        layers: Index of each MoE layer in the whole model.
        counts: Assignments that each expert got; None where they are not known.
    """

    step: int
    metrics: Mapping[str, float]
    layers: Sequence[int] = ()
    counts: Int[np.ndarray, "layers experts"] | None = None


class FindingTracker:
    """Watches a run.

    Args:
        thresholds: From where on something is a finding.
        topk: Experts that a token goes to; None where that is not known: then there are no findings of imbalance.
    """

    def __init__(self, thresholds: Thresholds, topk: int | None):
        self._thresholds, self._topk = thresholds, topk
        # Steps in a row, and since when, of what is above its threshold.
        self._streaks: dict[tuple[str, int | None], tuple[int, int]] = {}
        self._idle: dict[int, _IdleExperts] = {}
        self._going_on: dict[tuple[str, int | None], Finding] = {}
        self._over: list[Finding] = []

    @property
    def findings(self) -> list[Finding]:
        """All so far, in the order in which they began."""
        found = [*self._over, *self._going_on.values()]
        return sorted(found, key=lambda finding: (finding.first_step, finding.kind, finding.layer or -1))

    def observe(self, observation: StepObservation) -> list[Finding]:
        """Takes the next step.

        Returns:
            The findings that begin with it.
        """
        present: dict[tuple[str, int | None], Finding] = {}
        for finding in self._of_step(observation):
            present[finding.key] = finding
        begun = [finding for key, finding in present.items() if key not in self._going_on]
        for key, finding in list(self._going_on.items()):
            if key not in present:
                self._over.append(replace(finding, is_over=True))
                del self._going_on[key]
        for key, finding in present.items():
            earlier = self._going_on.get(key)
            self._going_on[key] = replace(finding, first_step=earlier.first_step if earlier else finding.first_step)
        return begun

    def _of_step(self, observation: StepObservation) -> list[Finding]:
        found = [self._overload(observation), self._skipped(observation)]
        if observation.counts is not None:
            for layer, counts in zip(observation.layers, observation.counts, strict=True):
                found += [self._dead_experts(observation.step, layer, counts)]
                found += [self._imbalance(observation.step, layer, counts)]
        return [finding for finding in found if finding is not None]

    def _streak(self, key: tuple[str, int | None], step: int, *, is_above: bool) -> tuple[int, int] | None:
        """Steps in a row and the first of them; None below the threshold."""
        if not is_above:
            self._streaks.pop(key, None)
            return None
        length, first = self._streaks.get(key, (0, step))
        self._streaks[key] = length + 1, first
        return self._streaks[key]

    def _overload(self, observation: StepObservation) -> Finding | None:
        limit = self._thresholds.overload_factor
        value = observation.metrics.get("train/moe/avg_overload_factor")
        if limit is None or value is None:
            return None
        streak = self._streak(("overload", None), observation.step, is_above=value > limit)
        if streak is None or streak[0] < self._thresholds.sustained_steps:
            return None
        text = f"the busiest expert-parallel rank has {value:.2f} times the work of the mean one since step {streak[1]}"
        return Finding("overload", None, streak[1], observation.step, False, text)

    def _skipped(self, observation: StepObservation) -> Finding | None:
        skipped = observation.metrics.get("train/skipped_updates", 0.0)
        streak = self._streak(("skipped_updates", None), observation.step, is_above=skipped > 0)
        if streak is None:
            return None
        text = f"updates have been left out since step {streak[1]}: their loss or gradient was NaN or infinite"
        return Finding("skipped_updates", None, streak[1], observation.step, False, text)

    def _imbalance(self, step: int, layer: int, counts: Int[np.ndarray, " experts"]) -> Finding | None:
        limit = self._thresholds.excess_cv
        if limit is None or self._topk is None:
            return None
        cv = float(coefficient_of_variation(counts[None])[0])
        null = float(null_coefficient_of_variation(counts[None], self._topk)[0])
        excess = math.sqrt(max(0.0, cv**2 - null**2))
        streak = self._streak(("imbalance", layer), step, is_above=excess > limit)
        if streak is None or streak[0] < self._thresholds.sustained_steps:
            return None
        text = (
            f"layer {layer}: the loads of its experts have spread by {cv:.2f} of their mean since step {streak[1]}; "
            f"by chance it would be {null:.2f}"
        )
        return Finding("imbalance", layer, streak[1], step, False, text)

    def _dead_experts(self, step: int, layer: int, counts: Int[np.ndarray, " experts"]) -> Finding | None:
        limit = self._thresholds.dead_expert_steps
        if limit is None:
            return None
        idle = self._idle.setdefault(layer, _IdleExperts(len(counts)))
        idle.observe(step, counts)
        number, since = idle.longer_than(limit)
        if number == 0:
            return None
        text = f"layer {layer}: {number} of {len(counts)} experts dead since step {since}; beyond sampling noise"
        return Finding("dead_experts", layer, since, step, False, text)


class _IdleExperts:
    """For how long the experts of one layer have had no token, and how many they should have had meanwhile.

    Args:
        num_experts: Experts of the layer.
    """

    def __init__(self, num_experts: int):
        self._steps = np.zeros(num_experts, dtype=np.int64)
        self._since = np.zeros(num_experts, dtype=np.int64)
        self._expected = np.zeros(num_experts)

    def observe(self, step: int, counts: Int[np.ndarray, " experts"]) -> None:
        """Takes the next step; one without any load says nothing."""
        total = int(counts.sum())
        if total == 0:
            return
        is_dead = dead(counts[None])[0]
        self._since = np.where(is_dead & (self._steps == 0), step, self._since)
        self._steps = np.where(is_dead, self._steps + 1, 0)
        self._expected = np.where(is_dead, self._expected + total / len(counts), 0.0)

    def longer_than(self, num_steps: int) -> tuple[int, int]:
        """How many experts have been dead for so many steps and beyond chance, and since when the first of them."""
        # By chance an expert misses all of its expected tokens with probability exp(-expected), in this layer some
        # expert with at most E times that.
        beyond_chance = self._expected > math.log(len(self._expected) / CHANCE)
        chosen = (self._steps >= num_steps) & beyond_chance
        return int(chosen.sum()), int(self._since[chosen].min()) if chosen.any() else 0
