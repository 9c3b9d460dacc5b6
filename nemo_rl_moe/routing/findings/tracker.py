# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Findings of unhealthy routing, wrong routes, failing rewards and idle steps, as texts for alerts, report and `watch`.

A finding is an episode. It begins when a condition has held for enough successive steps, and is over at the first step
at which the condition does not hold. A condition that soon returns continues the same episode. Chance is not a finding:
a router that sends tokens to random experts in each layer has no findings.
"""

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from nemo_rl_moe.routing.agreement.route_identity import RoutingAnomaly
from nemo_rl_moe.routing.findings.engine_signal import EngineKind, EngineSignal
from nemo_rl_moe.routing.findings.learning_signal import IdleKind, LearningSignal
from nemo_rl_moe.routing.findings.level_shift import LEAST_SHARE, RunningLevel, SuddenlyIdle
from nemo_rl_moe.routing.findings.reward_signal import FailedResponses, RewardKind, RewardSignal
from nemo_rl_moe.routing.findings.routing_signal import (
    MISSING_METRIC,
    WRONG_ROUTES,
    RoutingKind,
    RoutingSignal,
    WrongRoutesKind,
    wrong_routes,
)
from nemo_rl_moe.routing.findings.staleness_signal import StalenessKind, StalenessSignal
from nemo_rl_moe.routing.metrics.load_arrays import (
    coefficient_of_variation,
    dead,
    excess_coefficient_of_variation,
    highest_coefficient_of_variation_by_chance,
    null_variance,
    utilization,
)
from nemo_rl_moe.shapes import Bool, Int

FindingKind = (
    Literal[
        "dead_experts",
        "imbalance",
        "overload",
        "skipped_updates",
        "forced_routing",
        "missing_routes",
        "router_loss_gradient",
    ]
    | IdleKind
    | RewardKind
    | StalenessKind
    | RoutingKind
    | WrongRoutesKind
    | EngineKind
)
CHANCE = 1e-9
"""Highest probability of a finding under random routing, in one layer at one step. It is low, since a run has many."""
QUIET_STEPS = 100
"""Longest interruption of an episode, in steps. A condition that returns later is reported again."""
ROUTER_LOSSES = {"aux": "load balancing loss", "z": "z-loss"}
"""Source in the metrics `router_gradient/` -> router loss whose gradient is compared with the loss's equation."""
ROUTER_LOSS_METRICS = tuple(
    f"train/moe/router_gradient/{name}_{source}" for source in ROUTER_LOSSES for name in ("error", "scale")
)
MOST_GRADIENT_ERROR = 0.05
"""Largest distance between a router loss's gradient and that of its equation, relative to the gradient's length."""
MOST_ROUNDED_SCALE = 1.5
"""Largest ratio of a router loss's gradient to that of its equation in bfloat16, which rounds it by up to a fifth."""
_MOST_LAYERS_NAMED = 8
_SUDDEN_OVERLOAD = 0.25
"""Least rise of the overload factor above its usual level with which it is reported soon, if it is also above its
limit."""


@dataclass(frozen=True)
class Thresholds:
    """Limits beyond which a condition is a finding. None turns that kind of finding off.

    Attributes:
        dead_expert_steps: Number of successive steps in which an expert gets no token.
        excess_cv: Imbalance of a layer beyond sampling noise, `sqrt(cv^2 - cv_null^2)`.
        overload_factor: Work of the busiest expert-parallel rank over the mean rank's, `avg_overload_factor`. It is not
            corrected for chance, since the other ranks wait in any case.
        sustained_steps: Number of successive steps in which `excess_cv` or `overload_factor` must be exceeded.
        idle_steps: Number of successive steps of reinforcement learning that teach nothing. Also the number of steps
            from the start of a run in which a reward never varies.
        missing_routes_share: Share of rows (tokens x layers) that a rollout's capture lacks.
        missing_routes_steps: Number of successive steps in which `missing_routes_share` must be exceeded.
        sudden_steps: Number of successive steps of one of these conditions: an expert that had its share of tokens gets
            none, an expert never had a token while all others of its layer have some, the overload factor is far above
            its usual level, or a condition of `RoutingSignal` or `EngineSignal` holds.
        failed_responses_share: Share of the responses of a step or validation that the environment failed to score.
        unbounded_lag: Least lag, in optimizer steps, of a token whose importance weight the loss does not bound.
    """

    dead_expert_steps: int | None
    excess_cv: float | None
    overload_factor: float | None
    sustained_steps: int
    idle_steps: int | None = None
    missing_routes_share: float | None = None
    missing_routes_steps: int = 1
    sudden_steps: int | None = None
    failed_responses_share: float | None = None
    unbounded_lag: int | None = None


@dataclass(frozen=True)
class Finding:
    kind: FindingKind
    layer: int | None
    first_step: int
    last_step: int
    is_over: bool
    text: str

    @property
    def key(self) -> tuple[str, int | None]:
        """Kind and layer. A new finding with the same key begins only after the earlier one is over."""
        return self.kind, self.layer


def likewise(others: Sequence[Finding]) -> str:
    """Return the end of a finding's line, which names other layers that have the same finding."""
    if not others:
        return ""
    named = [str(finding.layer) for finding in others[:_MOST_LAYERS_NAMED]]
    more = [f"{len(others) - _MOST_LAYERS_NAMED} more"] if len(others) > _MOST_LAYERS_NAMED else []
    return f" (likewise layer{'s' if len(others) > 1 else ''} {', '.join(named + more)})"


class FindingTracker:
    """Tracker of the findings of a run. Steps are added in order.

    Args:
        topk: Number of experts of each token. None: imbalance is not detected.
    """

    def __init__(self, thresholds: Thresholds, topk: int | None, rank_names: Sequence[str] = ()):
        self._thresholds, self._topk = thresholds, topk
        self._overloaded, self._imbalanced, self._missing = _Streaks(1), _Streaks(0), _Streaks(1)
        self._overload_rose, self._overload_level = _Streaks(1), RunningLevel(_SUDDEN_OVERLOAD)
        self._idle, self._suddenly_idle = _IdleExperts((0, 0)), SuddenlyIdle((0, 0))
        self._signal = LearningSignal(thresholds.idle_steps)
        self._rewards = RewardSignal(thresholds.failed_responses_share, thresholds.idle_steps, QUIET_STEPS)
        self._routing = RoutingSignal(thresholds.sudden_steps, rank_names)
        self._engine = EngineSignal(thresholds.sudden_steps)
        self._staleness = StalenessSignal(thresholds.unbounded_lag, thresholds.sustained_steps)
        self._wrong_gradients: dict[str, str] = {}
        self._latest: dict[tuple[str, int | None], Finding] = {}
        self._earlier: list[Finding] = []

    @property
    def findings(self) -> list[Finding]:
        """All findings so far, in the order in which they began."""
        return sorted(
            [*self._earlier, *self._latest.values()],
            key=lambda found: (found.first_step, found.kind, -1 if found.layer is None else found.layer),
        )

    def observe(
        self,
        step: int,
        metrics: Mapping[str, float],
        layers: Sequence[int] = (),
        counts: Int[np.ndarray, "layers experts"] | None = None,
        failed: Sequence[FailedResponses] = (),
    ) -> list[Finding]:
        """Add a step, and return the findings that begin with it. For captured routes, see `observe_anomalies`."""
        found = list(self._of_step(step, metrics, layers, counts))
        for kind, since, text in self._rewards.observe(step, metrics, failed):
            found.append(Finding(kind, None, since, step, False, text))
        return self._continue({key for key in self._latest if key[0] not in WRONG_ROUTES.values()}, found)

    def observe_anomalies(self, step: int, anomalies: Sequence[RoutingAnomaly]) -> list[Finding]:
        """Add the anomalies of a step's captured routes, and return the findings that begin with this step.

        May be called before or after `observe` of the step, since anomalies are known before the step's metrics.
        """
        found = []
        for kind, layer, text in wrong_routes(anomalies):
            since = self._since(kind, layer, step)
            found.append(Finding(kind, layer, since, step, False, f"{text}; since step {since}"))
        return self._continue({key for key in self._latest if key[0] in WRONG_ROUTES.values()}, found)

    def _continue(self, known: Set[tuple[str, int | None]], found: Sequence[Finding]) -> list[Finding]:
        """Continue the findings with `known` keys that are found again, and end the others. Return the new findings."""
        present = {finding.key: finding for finding in found}
        begun = []
        for key in known - present.keys():
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

    def _of_step(
        self,
        step: int,
        metrics: Mapping[str, float],
        layers: Sequence[int],
        counts: Int[np.ndarray, "layers experts"] | None,
    ) -> Iterator[Finding]:
        yield from self._overload(step, metrics)
        yield from self._skipped_updates(step, metrics)
        yield from self._wrong_router_losses(step, metrics)
        yield from self._missing_routes(step, metrics)
        signals = (self._signal, self._routing, self._staleness, self._engine)
        for kind, since, text in (found for signal in signals for found in signal.observe(step, metrics)):
            yield Finding(kind, None, since, step, False, text)
        if counts is not None:
            if self._idle.shape != counts.shape:
                self._idle, self._suddenly_idle = _IdleExperts(counts.shape), SuddenlyIdle(counts.shape)
                self._imbalanced = _Streaks(len(layers))
            yield from self._dead_experts(step, layers, counts)
            yield from self._imbalance(step, layers, counts)

    def _overload(self, step: int, metrics: Mapping[str, float]) -> Iterator[Finding]:
        limit = self._thresholds.overload_factor
        value = metrics.get("train/moe/avg_overload_factor")
        if limit is None or value is None:
            return
        rose = self._overload_level.leaves(value, upwards=True)
        self._overloaded.observe(step, np.array([value > limit]))
        self._overload_rose.observe(step, np.array([value > limit and rose]))
        sudden = self._thresholds.sudden_steps
        is_sudden = sudden is not None and self._overload_rose.length[0] >= sudden
        if is_sudden or self._overloaded.length[0] >= self._thresholds.sustained_steps:
            since = int(self._overloaded.since[0])
            text = f"the busiest expert-parallel rank has {value:.2f} times the work of the mean one since step {since}"
            yield Finding("overload", None, since, step, False, text)

    def _skipped_updates(self, step: int, metrics: Mapping[str, float]) -> Iterator[Finding]:
        if metrics.get("train/skipped_updates", 0.0) > 0:
            since = self._since("skipped_updates", None, step)
            text = f"updates have been skipped since step {since}: their loss or gradient was NaN or infinite"
            yield Finding("skipped_updates", None, since, step, False, text)

    def _wrong_router_losses(self, step: int, metrics: Mapping[str, float]) -> Iterator[Finding]:
        for source, loss in ROUTER_LOSSES.items():  # measured at some steps, others keep the result
            scale = metrics.get(f"train/moe/router_gradient/scale_{source}")
            if scale is not None:
                error = metrics.get(f"train/moe/router_gradient/error_{source}")
                self._wrong_gradients.pop(source, None)
                if text := _wrong_gradient(loss, scale, error):
                    self._wrong_gradients[source] = text
        if self._wrong_gradients:
            since = self._since("router_loss_gradient", None, step)
            text = f"{'; '.join(self._wrong_gradients.values())}; since step {since}"
            yield Finding("router_loss_gradient", None, since, step, False, text)

    def _missing_routes(self, step: int, metrics: Mapping[str, float]) -> Iterator[Finding]:
        limit, share = self._thresholds.missing_routes_share, metrics.get(MISSING_METRIC)
        if limit is None or share is None:
            return
        self._missing.observe(step, np.array([share > limit]))
        if self._missing.length[0] >= self._thresholds.missing_routes_steps:
            since = int(self._missing.since[0])
            text = (
                f"{100 * share:.3g}% of the routes of rollouts are missing, and some have been since step {since}: an "
                "engine has lost them, or trajectories end with tokens of the environment; routers choose there"
            )
            yield Finding("missing_routes", None, since, step, False, text)

    def _since(self, kind: FindingKind, layer: int | None, step: int) -> int:
        """Return the first step of a condition that holds at `step`, or of the finding that the condition continues."""
        latest = self._latest.get((kind, layer))
        return step if latest is None or not _is_same_episode(latest, step) else latest.first_step

    def _imbalance(
        self, step: int, layers: Sequence[int], counts: Int[np.ndarray, "layers experts"]
    ) -> Iterator[Finding]:
        limit = self._thresholds.excess_cv
        if limit is None or self._topk is None:
            return
        cv, variance = coefficient_of_variation(counts), null_variance(counts, self._topk)
        excess = excess_coefficient_of_variation(cv, variance)
        # With few tokens, cv is occasionally far above its null.
        by_chance = highest_coefficient_of_variation_by_chance(counts, self._topk, CHANCE)
        self._imbalanced.observe(step, (excess > limit) & (cv > by_chance))
        for row in np.flatnonzero(self._imbalanced.length >= self._thresholds.sustained_steps).tolist():
            since = int(self._imbalanced.since[row])
            text = (
                f"layer {layers[row]}: the standard deviation of its experts' loads has been {cv[row]:.2f} times their "
                f"mean since step {since}; by chance it would be {math.sqrt(variance[row]):.2f}"
            )
            yield Finding("imbalance", int(layers[row]), since, step, False, text)

    def _dead_experts(
        self, step: int, layers: Sequence[int], counts: Int[np.ndarray, "layers experts"]
    ) -> Iterator[Finding]:
        limit = self._thresholds.dead_expert_steps
        if limit is None:
            return
        self._idle.observe(step, counts)
        self._suddenly_idle.observe(counts)
        soon = self._thresholds.sudden_steps
        sudden = self._suddenly_idle.for_steps(soon)
        if soon is not None:
            sudden |= self._idle.outliers() & self._idle.longer_than(soon)
        chosen = self._idle.longer_than(limit) | (sudden & self._idle.longer_than(1, LEAST_SHARE))
        for row in np.flatnonzero(chosen.any(1)).tolist():
            since = int(self._idle.since[row][chosen[row]].min())
            text = (
                f"layer {layers[row]}: {int(chosen[row].sum())} of {counts.shape[1]} experts dead since step {since}; "
                "beyond sampling noise"
            )
            yield Finding("dead_experts", int(layers[row]), since, step, False, text)


def _wrong_gradient(loss: str, scale: float, error: float | None) -> str | None:
    """Return a description of how a router loss's gradient differs from its equation, or None if it does not."""
    # `error` is None if rounding may be large. If so, only the scale decides.
    if error is None:
        is_off = not 1 / MOST_ROUNDED_SCALE < scale < MOST_ROUNDED_SCALE
    elif error <= MOST_GRADIENT_ERROR:
        return None
    else:
        is_off = abs(scale - 1) > MOST_GRADIENT_ERROR
    if is_off:
        return f"the {loss} trains with {scale:.2f} times its coefficient, as its gradient at a router shows"
    if error is None:
        return None
    return (
        f"the gradient of the {loss} at a router differs from its equation by {error:.0%} of its length, at the same"
        " scale: padding counts, or another loss acts on the router"
    )


def _is_same_episode(latest: Finding, since: int) -> bool:
    """Return whether a condition that has held since step `since` continues an earlier finding."""
    # The interruption ends at `since`, although the condition becomes a finding only some steps later.
    return since - latest.last_step - 1 <= QUIET_STEPS


class _Streaks:
    """Number of steps in a row in which each of several conditions has held, such as one per layer, and the first of
    these steps."""

    def __init__(self, num_places: int):
        self.length = np.zeros(num_places, dtype=np.int64)
        self.since = np.zeros(num_places, dtype=np.int64)

    def observe(self, step: int, is_so: Bool[np.ndarray, " places"]) -> None:
        """Add the next step. `is_so` has True for the conditions that hold."""
        self.since = np.where(is_so & (self.length == 0), step, self.since)
        self.length = np.where(is_so, self.length + 1, 0)


class _IdleExperts:
    """Counts for each expert since it last got a token: steps, and tokens that a fair share would have given it."""

    def __init__(self, shape: tuple[int, ...]):
        self.shape = shape
        self.since = np.zeros(shape, dtype=np.int64)
        self._steps = np.zeros(shape, dtype=np.int64)
        self._expected = np.zeros(shape)
        self._total = np.zeros(shape, dtype=np.int64)

    def observe(self, step: int, counts: Int[np.ndarray, "layers experts"]) -> None:
        """Add the next step. If a layer has no tokens at all, the counts of its experts do not change."""
        fair_share = counts.sum(1, keepdims=True) / counts.shape[1]
        is_dead, has_load = dead(counts), counts > 0
        self.since = np.where(is_dead & (self._steps == 0), step, self.since)
        self._steps = np.where(has_load, 0, self._steps + is_dead)
        self._expected = np.where(has_load, 0.0, self._expected + fair_share)
        self._total += counts

    def longer_than(self, num_steps: int, share: float = 1.0) -> Bool[np.ndarray, "layers experts"]:
        """Return a mask of experts without tokens for at least `num_steps` steps, and for longer than chance explains.

        Args:
            share: Load that an expert is expected to have, as a factor of its fair share.
        """
        # By chance an expert misses all its expected tokens with probability exp(-expected). For any of the E experts
        # of a layer the probability is at most E times higher.
        beyond_chance = share * self._expected > math.log(max(self.shape[1], 1) / CHANCE)
        chosen: Bool[np.ndarray, "layers experts"] = (self._steps >= max(num_steps, 1)) & beyond_chance
        return chosen

    def outliers(self) -> Bool[np.ndarray, "layers experts"]:
        """Return a mask of experts that never had a token. All experts with tokens in the layer have at least half of a
        fair share."""
        has_load = self._total > 0
        lowest = np.where(has_load, utilization(self._total), np.inf).min(1, keepdims=True)
        found: Bool[np.ndarray, "layers experts"] = ~has_load & np.isfinite(lowest) & (lowest >= LEAST_SHARE)
        return found
