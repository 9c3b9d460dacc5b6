# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a run's routing, in words. Fed step by step, so that a run can be told of it while it goes on.

A finding is an episode: it begins when something has been wrong for so many steps in a row, and is over at the first
step at which it is not. What goes wrong again soon is the same episode. Chance is not a finding: a router that sends
tokens to experts at random, layer by layer, has none.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from jaxtyping import Bool, Int

from nemo_rl_moe.moe.load_arrays import (
    coefficient_of_variation,
    dead,
    excess_coefficient_of_variation,
    highest_coefficient_of_variation_by_chance,
    null_coefficient_of_variation,
)

FindingKind = Literal["dead_experts", "imbalance", "overload", "skipped_updates", "forced_routing"]
CHANCE = 1e-9
"""How probable a finding may be, at one place and time, for a router that chooses at random. There are many places and
times: a thousand steps of a hundred layers."""
QUIET_STEPS = 100
"""What has been right for no more steps than these before it goes wrong again is still the same episode. Something that
comes and goes would otherwise be told each time."""
_MOST_LAYERS_NAMED = 8


@dataclass(frozen=True)
class Thresholds:
    """From where on something is a finding. Of each, None: never.

    Attributes:
        dead_expert_steps: Steps in a row that an expert gets no token.
        excess_cv: Imbalance of a layer beyond sampling noise, `sqrt(cv^2 - cv_null^2)`.
        overload_factor: Work of the busiest expert-parallel rank over the mean one's, `avg_overload_factor`. It counts
            as it stands, by chance or not: the other ranks wait all the same.
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
        is_over: Whether it has ended; one that comes back within `QUIET_STEPS` goes on again.
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


def likewise(others: Sequence[Finding]) -> str:
    """What a line about one finding says of others of its kind, in further layers; empty where there are none."""
    if not others:
        return ""
    named = [str(finding.layer) for finding in others[:_MOST_LAYERS_NAMED]]
    more = [f"{len(others) - _MOST_LAYERS_NAMED} more"] if len(others) > _MOST_LAYERS_NAMED else []
    return f" (likewise layer{'s' if len(others) > 1 else ''} {', '.join(named + more)})"


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
        self._overloaded, self._imbalanced = _Streaks(1), _Streaks(0)
        self._idle = _IdleExperts((0, 0))
        self._latest: dict[tuple[str, int | None], Finding] = {}
        self._earlier: list[Finding] = []

    @property
    def findings(self) -> list[Finding]:
        """All so far, in the order in which they began."""
        return sorted([*self._earlier, *self._latest.values()], key=_order)

    def observe(self, observation: StepObservation) -> list[Finding]:
        """Takes the next step.

        Returns:
            The findings that begin with it.
        """
        present = {finding.key: finding for finding in self._of_step(observation)}
        begun = []
        for key in self._latest.keys() - present.keys():
            self._latest[key] = replace(self._latest[key], is_over=True)
        for key, finding in present.items():
            latest = self._latest.get(key)
            if latest is not None and _is_same_episode(latest, finding.first_step):
                self._latest[key] = replace(finding, first_step=latest.first_step)
                continue
            if latest is not None:
                self._earlier.append(latest)
            self._latest[key] = finding
            begun.append(finding)
        return begun

    def _of_step(self, observation: StepObservation) -> Iterator[Finding]:
        yield from self._overload(observation)
        yield from self._skipped_updates(observation)
        if observation.counts is not None:
            if len(observation.counts) != len(observation.layers):
                raise ValueError(f"{len(observation.layers)} layers and counts of {len(observation.counts)}")
            if self._idle.shape != observation.counts.shape:
                self._idle = _IdleExperts(observation.counts.shape)
                self._imbalanced = _Streaks(len(observation.layers))
            yield from self._dead_experts(observation.step, observation.layers, observation.counts)
            yield from self._imbalance(observation.step, observation.layers, observation.counts)

    def _overload(self, observation: StepObservation) -> Iterator[Finding]:
        limit = self._thresholds.overload_factor
        value = observation.metrics.get("train/moe/avg_overload_factor")
        if limit is None or value is None:
            return
        self._overloaded.observe(observation.step, np.array([value > limit]))
        if self._overloaded.length[0] >= self._thresholds.sustained_steps:
            since = int(self._overloaded.since[0])
            text = f"the busiest expert-parallel rank has {value:.2f} times the work of the mean one since step {since}"
            yield Finding("overload", None, since, observation.step, False, text)

    def _skipped_updates(self, observation: StepObservation) -> Iterator[Finding]:
        if observation.metrics.get("train/skipped_updates", 0.0) > 0:
            latest = self._latest.get(("skipped_updates", None))
            goes_on = latest is not None and _is_same_episode(latest, observation.step)
            since = latest.first_step if latest is not None and goes_on else observation.step
            text = f"updates have been left out since step {since}: their loss or gradient was NaN or infinite"
            yield Finding("skipped_updates", None, since, observation.step, False, text)

    def _imbalance(
        self, step: int, layers: Sequence[int], counts: Int[np.ndarray, "layers experts"]
    ) -> Iterator[Finding]:
        limit = self._thresholds.excess_cv
        if limit is None or self._topk is None:
            return
        cv, null = coefficient_of_variation(counts), null_coefficient_of_variation(counts, self._topk)
        excess = excess_coefficient_of_variation(counts, self._topk)
        # Few tokens spread far beyond the null now and then.
        by_chance = highest_coefficient_of_variation_by_chance(counts, self._topk, CHANCE)
        self._imbalanced.observe(step, (excess > limit) & (cv > by_chance))
        for row in np.flatnonzero(self._imbalanced.length >= self._thresholds.sustained_steps).tolist():
            since = int(self._imbalanced.since[row])
            text = (
                f"layer {layers[row]}: the loads of its experts have spread by {cv[row]:.2f} of their mean since step "
                f"{since}; by chance it would be {null[row]:.2f}"
            )
            yield Finding("imbalance", int(layers[row]), since, step, False, text)

    def _dead_experts(
        self, step: int, layers: Sequence[int], counts: Int[np.ndarray, "layers experts"]
    ) -> Iterator[Finding]:
        limit = self._thresholds.dead_expert_steps
        if limit is None:
            return
        self._idle.observe(step, counts)
        chosen = self._idle.longer_than(limit)
        for row in np.flatnonzero(chosen.any(1)).tolist():
            since = int(self._idle.since[row][chosen[row]].min())
            text = (
                f"layer {layers[row]}: {int(chosen[row].sum())} of {counts.shape[1]} experts dead since step {since}; "
                "beyond sampling noise"
            )
            yield Finding("dead_experts", int(layers[row]), since, step, False, text)


def _is_same_episode(latest: Finding, since: int) -> bool:
    """Whether what has been wrong since some step continues a finding.

    It is the steps between that count, not those until it is found again: an expert with one token now and then is
    found dead again long after each.
    """
    return since - latest.last_step - 1 <= QUIET_STEPS


def _order(finding: Finding) -> tuple[int, str, int]:
    return finding.first_step, finding.kind, -1 if finding.layer is None else finding.layer


class _Streaks:
    """For how many steps in a row something has been the case, at each of several places, and since when.

    Args:
        num_places: How many.
    """

    def __init__(self, num_places: int):
        self.length = np.zeros(num_places, dtype=np.int64)
        self.since = np.zeros(num_places, dtype=np.int64)

    def observe(self, step: int, is_so: Bool[np.ndarray, " places"]) -> None:
        """Takes the next step."""
        self.since = np.where(is_so & (self.length == 0), step, self.since)
        self.length = np.where(is_so, self.length + 1, 0)


class _IdleExperts:
    """For how long each expert has had no token, and how many it should have had meanwhile.

    Args:
        shape: Layers and experts of each.
    """

    def __init__(self, shape: tuple[int, ...]):
        self.shape = shape
        self.since = np.zeros(shape, dtype=np.int64)
        self._steps = np.zeros(shape, dtype=np.int64)
        self._expected = np.zeros(shape)

    def observe(self, step: int, counts: Int[np.ndarray, "layers experts"]) -> None:
        """Takes the next step; a layer without any load says nothing."""
        fair_share = counts.sum(1, keepdims=True) / counts.shape[1]
        is_dead, has_load = dead(counts), counts > 0
        self.since = np.where(is_dead & (self._steps == 0), step, self.since)
        self._steps = np.where(has_load, 0, self._steps + is_dead)
        self._expected = np.where(has_load, 0.0, self._expected + fair_share)

    def longer_than(self, num_steps: int) -> Bool[np.ndarray, "layers experts"]:
        """The experts that have been dead for so many steps, and beyond chance."""
        # By chance an expert misses all of its expected tokens with probability exp(-expected), in its layer some
        # expert with at most E times that.
        beyond_chance = self._expected > math.log(max(self.shape[1], 1) / CHANCE)
        chosen: Bool[np.ndarray, "layers experts"] = (self._steps >= max(num_steps, 1)) & beyond_chance
        return chosen
