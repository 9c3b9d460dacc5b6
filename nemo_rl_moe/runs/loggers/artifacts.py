# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Arrays that a training step produces besides its metrics: the file, plots and alerts of each kind.

A new kind needs a writer, an entry in `ARTIFACTS`, and an observer of the step that returns the artifact under the
entry's name (`models/megatron/training/observers.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic

import numpy as np

from nemo_rl_moe.config.suggestions import did_you_mean, nearest
from nemo_rl_moe.errors import UserCodeError
from nemo_rl_moe.runs.folder.advantages import AdvantageWriter
from nemo_rl_moe.runs.folder.artifacts import (
    BY_LAG,
    EXPERT_LOAD,
    EXPERTS_BY_ADVANTAGE,
    EXPERTS_BY_WRITER,
    ROUTING,
    TIME_LINE,
    Artifact,
)
from nemo_rl_moe.runs.folder.by_lag import LagWriter
from nemo_rl_moe.runs.folder.expert_load import ExpertLoadWriter
from nemo_rl_moe.runs.folder.routing import RoutingWriter
from nemo_rl_moe.runs.folder.step_tables import MAX_DELAY_S, StepTableWriter
from nemo_rl_moe.runs.folder.time_line import TimeLineWriter
from nemo_rl_moe.runs.folder.writer_load import WriterLoadWriter
from nemo_rl_moe.runs.loggers.alerts import Alert, AlertWatch
from nemo_rl_moe.runs.loggers.expert_load_plots import expert_load_plots
from nemo_rl_moe.runs.loggers.lag_plots import lag_plots
from nemo_rl_moe.runs.loggers.plots import advantage_plots, modality_plots, routing_plots
from nemo_rl_moe.runs.loggers.time_line_plot import time_line_plots
from nemo_rl_moe.runs.loggers.writer_plots import writer_plots

if TYPE_CHECKING:
    # Loggers work without torch.
    from nemo_rl_moe.routing.agreement.statistics import RoutingReport
    from nemo_rl_moe.routing.metrics.load_statistics import ExpertLoad
    from nemo_rl_moe.routing.metrics.routing_advantage import AdvantageScores


@dataclass(frozen=True)
class ArtifactKind(Generic[Artifact]):
    """One kind of artifact.

    Attributes:
        plot: Function that returns the plots of a step: key -> PNG file. It runs for seconds in the thread of a logger,
            and must not change the artifact.
        alerts: Function that passes the artifact to the watch, before the metrics of the step, and returns new alerts.
    """

    name: str
    writer: type[StepTableWriter[Artifact]]
    plot: Callable[[int, Artifact], Mapping[str, bytes]]
    alerts: Callable[[AlertWatch, int, Artifact], Sequence[Alert]] = lambda watch, step, artifact: ()


def _plot_expert_load(step: int, load: "ExpertLoad") -> Mapping[str, bytes]:
    counts = np.asarray(load.counts)
    of_load = expert_load_plots(step, load.layers, counts)
    if load.image_counts is None:
        return of_load
    return {**of_load, **modality_plots(step, load.layers, counts, np.asarray(load.image_counts), load.topk)}


def _watch_expert_load(watch: AlertWatch, step: int, load: "ExpertLoad") -> Sequence[Alert]:
    watch.observe_load(step, load.layers, np.asarray(load.counts))
    return ()


def _plot_routing(step: int, report: "RoutingReport") -> Mapping[str, bytes]:
    return routing_plots(step, report.layers, np.asarray(report.totals.rows))


def _watch_routing(watch: AlertWatch, step: int, report: "RoutingReport") -> Sequence[Alert]:
    return watch.observe_anomalies(step, report.anomalies)


def _plot_advantages(step: int, found: "AdvantageScores") -> Mapping[str, bytes]:
    return advantage_plots(step, found.layers, np.asarray(found.scores))


ARTIFACTS: dict[str, ArtifactKind[Any]] = {
    kind.name: kind
    for kind in (
        ArtifactKind(EXPERT_LOAD.name, ExpertLoadWriter, _plot_expert_load, _watch_expert_load),
        ArtifactKind(ROUTING.name, RoutingWriter, _plot_routing, _watch_routing),
        ArtifactKind(EXPERTS_BY_ADVANTAGE.name, AdvantageWriter, _plot_advantages),
        ArtifactKind(EXPERTS_BY_WRITER.name, WriterLoadWriter, writer_plots),
        ArtifactKind(BY_LAG.name, LagWriter, lag_plots),
        ArtifactKind(TIME_LINE.name, TimeLineWriter, time_line_plots),
    )
}
"""Name -> kind of artifact."""


class ArtifactTables:
    def __init__(
        self,
        run_folder: Path,
        warn: Callable[[str], None],
        message: Callable[[str], None] = lambda text: None,
        *,
        max_delay_s: float = MAX_DELAY_S,
    ):
        self._writers = {
            name: kind.writer(run_folder, warn, message, max_delay_s=max_delay_s) for name, kind in ARTIFACTS.items()
        }

    def write(self, step: int, name: str, artifact: Any) -> None:
        if name not in self._writers:
            raise UserCodeError(
                f"ARTIFACTS in nemo_rl_moe/runs/loggers/artifacts.py has no {name!r}, which an observer of step {step}"
                f" returned{did_you_mean(nearest(name, self._writers))}"
            )
        self._writers[name].write(step, artifact)

    def flush(self) -> None:
        for writer in self._writers.values():
            writer.flush()

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
