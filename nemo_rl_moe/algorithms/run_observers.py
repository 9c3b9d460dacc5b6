# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Observers of a run on the driver: they measure and check each step of the loop, and may end the run."""

from collections.abc import Iterable, Sequence

from nemo_rl_moe.distributed.batch import TokenBatch
from nemo_rl_moe.errors import RoutingAnomalyError
from nemo_rl_moe.generation.interface import GenerationEngine
from nemo_rl_moe.generation.refit_check import RefitCheck
from nemo_rl_moe.metrics import PhaseClock
from nemo_rl_moe.models.interfaces import TrainResult
from nemo_rl_moe.rollouts.trajectory import Trajectory
from nemo_rl_moe.routing.indexer_replay import INDEXER_POSITIONS
from nemo_rl_moe.routing.replay import ROUTED_EXPERTS
from nemo_rl_moe.runs.folder.artifacts import ROUTING

ANOMALY_KEY = "policy.megatron_cfg.routing_replay_on_anomaly"
_MOST_SHOWN = 5


class RunObserver:
    """Observer of each step of a run. A subclass overrides the methods that it needs.

    The methods return metrics of the step without the prefix `train/`. They time slow work as phases of the clock.
    """

    def before_update(
        self, step: int, batch: TokenBatch, trajectories: Sequence[Trajectory], clock: PhaseClock
    ) -> dict[str, float]:
        """Observe the policy that generated a batch, before the batch is trained on.

        Args:
            step: Counted from 1.
            trajectories: Trajectories of the batch. Empty if the batch comes from a data set.
        """
        return {}

    def after_update(self, result: TrainResult, clock: PhaseClock) -> dict[str, float]:
        """Observe the policy after a step's updates. It is called after the artifacts of the step were recorded."""
        return {}

    def during_refit(self) -> None:
        """Start work that the policy's ranks do after sending their weights. Called in each transfer of weights."""

    def after_refit(self, clock: PhaseClock) -> dict[str, float]:
        """Observe the generation engine with its new weights. This is also called before the first step."""
        return {}


def joined(parts: Iterable[dict[str, float]]) -> dict[str, float]:
    """Return the metrics of several observers in one dictionary."""
    return {name: value for metrics in parts for name, value in metrics.items()}


class CaptureVolume(RunObserver):
    """Observer that reports the size of a batch's routed experts, `moe/routing/captured_bytes`."""

    def before_update(
        self, step: int, batch: TokenBatch, trajectories: Sequence[Trajectory], clock: PhaseClock
    ) -> dict[str, float]:
        names = {"routing": ROUTED_EXPERTS, "indexer": INDEXER_POSITIONS}
        sizes = {name: captured_bytes(batch, column) for name, column in names.items()}
        return {f"moe/{name}/captured_bytes": float(size) for name, size in sizes.items() if size is not None}


class RoutingAnomalyWatch(RunObserver):
    """Observer that ends a run if replayed routed experts cannot be right. Loggers' alerts report this without it."""

    def after_update(self, result: TrainResult, clock: PhaseClock) -> dict[str, float]:
        report = ROUTING.of(result.artifacts)
        if report is not None and report.anomalies:
            found = "; ".join(anomaly.text for anomaly in report.anomalies[:_MOST_SHOWN])
            num_more = len(report.anomalies) - _MOST_SHOWN
            more = f"; and {num_more} more" if num_more > 0 else ""
            what = "positions" if {anomaly.kind for anomaly in report.anomalies} == {"indexer"} else "experts"
            raise RoutingAnomalyError(f"replayed {what} cannot be right ({ANOMALY_KEY}: stop): {found}{more}")
        return {}


class CheckedRefits(RunObserver):
    """Observer that checks each refit: `refit/logprob_gap`, `refit/checks_failed` and `refit/weights_compared`."""

    def __init__(self, check: RefitCheck, engine: GenerationEngine):
        self._check, self._engine = check, engine

    def during_refit(self) -> None:
        self._check.begin()

    def after_refit(self, clock: PhaseClock) -> dict[str, float]:
        """Compare the engine with the trainer.

        Raises:
            WeightSyncError: The engine does not compute with the trainer's weights.
        """
        with clock.phase("refit_check"):
            gap = self._check.after_refit(self._engine)
        metrics = {"refit/logprob_gap": gap.largest, "refit/checks_failed": float(self._check.num_failed)}
        if self._check.share_compared is not None:
            metrics["refit/weights_compared"] = self._check.share_compared
        return metrics


def checked_refits(check: RefitCheck | None, engine: GenerationEngine) -> list[RunObserver]:
    """Return a list with the observer that checks the refits of an engine. Empty without a check."""
    return [] if check is None else [CheckedRefits(check, engine)]


def captured_bytes(batch: TokenBatch, name: str = ROUTED_EXPERTS) -> int | None:
    """Return the size in bytes of a batch's stored column, such as routed experts, or None without the column."""
    capture = batch.stored.get(name)
    return None if capture is None else sum(rows.num_bytes for rows in capture.rows if rows is not None)
