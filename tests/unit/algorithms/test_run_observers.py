# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Observers of a run: what each makes of a step, and in which order they are asked."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from nemo_rl_moe.algorithms.run_observers import RunObserver, RunObservers, TapeWatch
from nemo_rl_moe.distributed.batch import TokenBatch
from nemo_rl_moe.errors import RoutingTapeError
from nemo_rl_moe.metrics import PhaseClock
from nemo_rl_moe.models.interfaces import TrainResult
from nemo_rl_moe.moe.tape_identity import TapeAnomaly
from nemo_rl_moe.rollouts.trajectory import Trajectory
from nemo_rl_moe.run_folder.artifacts import ROUTING
from tests.support.made_tapes import tape_report
from tests.support.tiny_model import tiny_batch


def trained(*anomalies: TapeAnomaly) -> TrainResult:
    report = tape_report([0], anomalies=list(anomalies))
    return TrainResult(0.0, 0.0, 0.0, 1, 1, {}, {}, artifacts={ROUTING.name: report})


@dataclass
class Diary(RunObserver):
    """Writes down what it sees."""

    name: str
    seen: list[str] = field(default_factory=list)

    def before_update(
        self, step: int, batch: TokenBatch, trajectories: Sequence[Trajectory], clock: PhaseClock
    ) -> dict[str, float]:
        self.seen.append(f"{self.name} before {step}")
        return {self.name: 1.0, "of the last": len(self.seen)}

    def after_update(self, result: TrainResult, clock: PhaseClock) -> dict[str, float]:
        self.seen.append(f"{self.name} after")
        return {f"{self.name} after": 2.0}

    def during_refit(self) -> None:
        self.seen.append(f"{self.name} during")

    def after_refit(self, clock: PhaseClock) -> dict[str, float]:
        self.seen.append(f"{self.name} refit")
        return {f"{self.name} refit": 3.0}


def test_all_are_asked_in_their_order_and_their_metrics_are_joined() -> None:
    seen: list[str] = []
    observers, clock = RunObservers([Diary("a", seen), Diary("b", seen)]), PhaseClock()
    assert observers.before_update(4, tiny_batch(0), (), clock) == {"a": 1.0, "b": 1.0, "of the last": 2}
    assert observers.after_update(trained(), clock) == {"a after": 2.0, "b after": 2.0}
    observers.during_refit()
    assert observers.after_refit(clock) == {"a refit": 3.0, "b refit": 3.0}
    assert seen == [f"{name} {what}" for what in ("before 4", "after", "during", "refit") for name in "ab"]


LATE, LATER = TapeAnomaly("token", "routes are one token late"), TapeAnomaly("token", "routes are one token early")


def test_routes_that_cannot_be_right_end_a_run_that_replays_them() -> None:
    watch = TapeWatch(stops=True)
    watch.after_update(trained(), PhaseClock())
    watch.after_update(replace(trained(), artifacts={}), PhaseClock())
    with pytest.raises(RoutingTapeError) as error:
        watch.after_update(trained(*[LATE, LATER] * 4), PhaseClock())
    key = "policy.megatron_cfg.routing_replay_on_anomaly"
    assert str(error.value).startswith(f"replayed experts cannot be right ({key}: stop): routes are one token late;")
    assert str(error.value).endswith("; and 3 more")
    assert error.value.exit_code == 1


def test_routes_that_are_compared_alone_end_nothing() -> None:
    assert TapeWatch(stops=False).after_update(trained(LATE, LATER), PhaseClock()) == {}
