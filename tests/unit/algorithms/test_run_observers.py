# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Observers of a run: what each makes of a step."""

from dataclasses import replace

import pytest

from nemo_rl_moe.algorithms.run_observers import RoutingAnomalyWatch
from nemo_rl_moe.errors import RoutingAnomalyError
from nemo_rl_moe.metrics import PhaseClock
from nemo_rl_moe.models.interfaces import TrainResult
from nemo_rl_moe.routing.agreement.route_identity import RoutingAnomaly
from nemo_rl_moe.runs.folder.artifacts import ROUTING
from tests.support.made_runs import routing_report


def trained(*anomalies: RoutingAnomaly) -> TrainResult:
    report = routing_report([0], anomalies=list(anomalies))
    return TrainResult(0.0, 0.0, 0.0, 1, 1, {}, {}, artifacts={ROUTING.name: report})


LATE, LATER = (
    RoutingAnomaly("token", "routes are one token late"),
    RoutingAnomaly("token", "routes are one token early"),
)


def test_routes_that_cannot_be_right_end_a_run_that_replays_them() -> None:
    watch = RoutingAnomalyWatch()
    watch.after_update(trained(), PhaseClock())
    watch.after_update(replace(trained(), artifacts={}), PhaseClock())
    with pytest.raises(RoutingAnomalyError) as error:
        watch.after_update(trained(*[LATE, LATER] * 4), PhaseClock())
    key = "policy.megatron_cfg.routing_replay_on_anomaly"
    assert str(error.value).startswith(f"replayed experts cannot be right ({key}: stop): routes are one token late;")
    assert str(error.value).endswith("; and 3 more")
    assert error.value.exit_code == 1
