# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A step recorder over lists, and checkpoints that only keep a diary."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_rl_moe.algorithms.step_recorder import RecordSinks, StepRecorder
from nemo_rl_moe.checkpoints.state import LoopState
from nemo_rl_moe.routing.agreement.statistics import RoutingReport
from nemo_rl_moe.runs.folder.artifacts import EXPERT_LOAD, ROUTING
from nemo_rl_moe.runs.loggers.interface import MetricLogger


@dataclass
class DiaryOfCheckpoints:
    """Saves nothing.

    Attributes:
        diary: Gets `save N`, `poll` and `finish`.
        period: Steps between two that are due; 0: none is.
        states: What was saved.
        folder: Gets the queue of each checkpoint; None: nothing is written.
    """

    diary: list[str] = field(default_factory=list)
    period: int = 0
    states: list[LoopState] = field(default_factory=list)
    folder: Path | None = None

    @property
    def last_published(self) -> Path | None:
        return Path(f"step_{self.states[-1].step}") if self.states else None

    def is_due(self, step: int) -> bool:
        return self.period > 0 and step % self.period == 0

    def start(
        self, state: LoopState, metrics: Mapping[str, float], write_more: Callable[[Path], None] = lambda folder: None
    ) -> None:
        assert not any(name.startswith("timing/checkpoint") for name in metrics)
        self.diary.append(f"save {state.step}")
        self.states.append(state)
        if self.folder is not None:
            checkpoint = self.folder / f"step_{state.step}"
            checkpoint.mkdir()
            write_more(checkpoint)

    def poll(self) -> None:
        pass

    def finish(self) -> None:
        self.diary.append("finish")


def make_recorder(
    logger: MetricLogger,
    loads: list[tuple[int, Any]] | None = None,
    samples: Callable[[int, str, Any], None] = lambda step, split, responses: None,
    checkpoints: Any = None,
    stop_reason: Callable[[], str | None] = lambda: None,
    start: LoopState | None = None,
    max_skipped_in_a_row: int = 3,
    captures: list[tuple[int, RoutingReport]] | None = None,
    flush: Callable[[], None] = lambda: None,
) -> StepRecorder:
    """Return a recorder that writes to lists."""

    def log_artifact(step: int, name: str, artifact: Any) -> None:
        kept = {EXPERT_LOAD.name: loads, ROUTING.name: captures}[name]
        if kept is not None:
            kept.append((step, artifact))

    sinks = RecordSinks(logger, log_artifact, samples, flush)
    return StepRecorder(sinks, checkpoints, stop_reason, max_skipped_in_a_row, start or LoopState())
