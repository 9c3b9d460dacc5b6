# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Signs that the engine does not compute with the weights that it should have, from metrics of an audit."""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Literal

import numpy as np

from nemo_rl_moe.routing.findings.streaks import Streaks

EngineKind = Literal[
    "pinned_engine",
    "stale_prefix_cache",
    "engine_moves_too_far",
    "growing_gap",
    "resetting_gap",
    "sampling_mask",
]
_PREFIX = "train/moe/engine/"
SINCE, PREFIX_ROWS = f"{_PREFIX}since_step", f"{_PREFIX}prefix_rows"
TRAINER_MOVED, ENGINE_MOVED = f"{_PREFIX}trainer_moved_share", f"{_PREFIX}engine_moved_share"
PREFIX_DIFFERING, FRESH_DIFFERING = f"{_PREFIX}prefix_differing_share", f"{_PREFIX}fresh_differing_share"
GAP, VERSION = f"{_PREFIX}gap", f"{_PREFIX}weight_version"
MASS, FLOOR = f"{_PREFIX}subset_mass", f"{_PREFIX}subset_floor"
METRICS = (
    *(SINCE, PREFIX_ROWS, TRAINER_MOVED, ENGINE_MOVED, PREFIX_DIFFERING, FRESH_DIFFERING),
    *(GAP, VERSION, MASS, FLOOR),
)
"""Keys that `EngineSignal` reads."""
_STANDS, _RUNS_AHEAD, _DISAGREES = 0.25, 1.5, 0.3
"""Ratios to the number of rows (routes of tokens) that training changed since an earlier step. The engine does not move
if it changed at most the first ratio of rows. It moves too far if it changed at least the second ratio, and at least
the third ratio of rows differs between engine and training now."""
_LEAST_STEPS, _LEAST_CYCLE, _LEAST_GROWTH, _LEAST_ORDER, _MOST_AFTER_RESET = 10, 6, 3.0, 0.9, 0.5
_WINDOW, _VERSION_STEPS = 32, 4
_LEAST_GAP = 1e-3
"""Least peak of the log-probability gap between engine and training, in nats, for a finding."""
_Tooth = tuple[tuple[int, float], tuple[int, float]]
"""(step, log-probability gap) of the first and of the last step of a rise after which the gap fell. Two such rises in
succession are a saw-tooth. By chance, six values are ascending with probability 1 in 720."""


class EngineSignal:
    """Detects, from the metrics of successive steps, that the engine's weights cannot be the weights of training."""

    def __init__(self, num_steps: int | None):
        self._num_steps = num_steps
        self._streaks: Streaks[EngineKind] = Streaks()
        self._gaps: deque[tuple[int, float]] = deque(maxlen=_WINDOW)
        self._tooth: _Tooth | None = None
        self._version: tuple[float, int, int] | None = None
        self._has_advanced = False

    def observe(self, step: int, metrics: Mapping[str, float]) -> Iterator[tuple[EngineKind, int, str]]:
        """Add a step. Yield (condition, its first step, description) for each condition that has held long enough."""
        if self._num_steps is None:
            return
        texts = {
            **self._of_prefixes(metrics),
            **self._of_gap(step, metrics),
            **self._of_version(step, metrics),
            **_of_subset(metrics),
        }
        for kind, first, length in self._streaks.extend(step, texts):
            text, has_lasted = texts[kind]
            if has_lasted or length >= self._num_steps:
                yield kind, first, text.format(first)

    def _of_prefixes(self, metrics: Mapping[str, float]) -> dict[EngineKind, tuple[str, bool]]:
        if SINCE not in metrics:
            return {}
        trainer, engine = metrics[TRAINER_MOVED], metrics[ENGINE_MOVED]
        where = (
            f"in {metrics[PREFIX_ROWS]:,.0f} rows of prefixes that also came at step {metrics[SINCE]:.0f}, training"
            f" has changed {trainer:.1%} and the engine {engine:.1%}"
        )
        if engine <= _STANDS * trainer:
            if metrics.get(FRESH_DIFFERING, np.inf) <= metrics[PREFIX_DIFFERING] / 2:
                text = (
                    f"the engine's routes of prefixes have stood still since step {{}}, but not the routes after them:"
                    f" {where}; a prefix cache, or a recurrent state, of older weights outlives refits"
                )
                return {"stale_prefix_cache": (text, False)}
            text = (
                f"the engine's routes have stood still since step {{}}: {where}; it does not get the weights, or its"
                " adapter"
            )
            return {"pinned_engine": (text, False)}
        if engine >= _RUNS_AHEAD * trainer and metrics[PREFIX_DIFFERING] >= _DISAGREES * trainer:
            text = (
                f"the engine's routes have moved {engine / trainer:.1f} times as far as training's since step {{}}:"
                f" {where}; an update may be applied more than once, such as an adapter that is added on several ranks"
            )
            return {"engine_moves_too_far": (text, False)}
        return {}

    def _of_gap(self, step: int, metrics: Mapping[str, float]) -> dict[EngineKind, tuple[str, bool]]:
        gap = metrics.get(GAP)
        if gap is None or not np.isfinite(gap):
            return {}
        if self._gaps and gap <= _MOST_AFTER_RESET * self._gaps[-1][1]:
            cycle, before = list(self._gaps), self._tooth
            self._gaps.clear()
            self._gaps.append((step, gap))
            is_tooth = len(cycle) >= _LEAST_CYCLE and _rises([value for _, value in cycle])
            self._tooth = (cycle[0], cycle[-1]) if is_tooth else None
            if before is None or self._tooth is None:
                return {}
            ((start, low), (last, high)), ((again, _), _) = self._tooth, before
            text = (
                f"the log-prob gap rose from {low:.2g} to {high:.2g} over the steps {start} to {last}, and was"
                f" {gap:.2g} again at step {{}}, as after the steps {again} to {start - 1}: a restart of the"
                " engine resets the cause, such as a prefix cache or a recurrent state of older weights"
            )
            return {"resetting_gap": (text, True)}
        self._gaps.append((step, gap))
        if len(self._gaps) < _LEAST_STEPS or not _rises([value for _, value in self._gaps]):
            return {}
        (start, low) = self._gaps[0]
        though = ", though the weight versions advance" if self._has_advanced else ""
        text = (
            f"the log-prob gap has grown step by step from {low:.2g} at step {start} to {gap:.2g}{though}: it follows"
            " the distance from the first weights, as if the engine did not get the new ones, got an adapter twice,"
            " or kept a state of older ones"
        )
        return {"growing_gap": (text, True)}

    def _of_version(self, step: int, metrics: Mapping[str, float]) -> dict[EngineKind, tuple[str, bool]]:
        version = metrics.get(VERSION)
        if version is None:
            return {}
        last = self._version
        is_same = last is not None and last[0] == version
        self._has_advanced |= last is not None and version > last[0]
        _, since, length = last if last is not None and is_same else (version, step, 0)
        self._version = version, since, length + 1
        if length < _VERSION_STEPS:
            return {}
        text = f"the rollout's weight version has been {version:.0f} since step {since}: the engine gets no weights"
        return {"pinned_engine": (text, True)}


def _of_subset(metrics: Mapping[str, float]) -> dict[EngineKind, tuple[str, bool]]:
    if MASS not in metrics:
        return {}
    text = (
        "the rollout's log-probs have been normalised over a subset of the vocabulary (top-p, top-k) since step {},"
        f" training's have not: they are higher at nearly every token, and the subset keeps {metrics[MASS]:.3f} of the"
        f" probability on average, at least {metrics[FLOOR]:.2f}; train with the same subset, or sample without"
    )
    return {"sampling_mask": (text, True)}


def _rises(values: list[float]) -> bool:
    """Return True if values triple and rise almost steadily (Kendall's tau of at least 0.9)."""
    found = np.array(values)
    if found.max() < _LEAST_GAP:
        return False
    if found[-2:].mean() < _LEAST_GROWTH * max(float(found[:2].mean()), 1e-12):
        return False
    signs = np.sign(found[None] - found[:, None])[np.triu_indices(len(found), 1)]
    return bool(signs.mean() >= _LEAST_ORDER)
