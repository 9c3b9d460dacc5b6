# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Tells the user of findings while the run goes on: each episode once."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from jaxtyping import Int

from nemo_rl_moe.errors import DataError
from nemo_rl_moe.moe.findings import (
    QUIET_STEPS,
    Finding,
    FindingTracker,
    StepObservation,
    Thresholds,
    likewise,
)
from nemo_rl_moe.run_folder.expert_load import read_load_arrays
from nemo_rl_moe.run_folder.metrics import METRICS_FILE_NAME, read_metrics

_MOST_LINES = 20


class AlertSettings(Protocol):
    """`logger.alerts`: whether to alert, and from where on; see `Thresholds`."""

    @property
    def enabled(self) -> bool: ...
    @property
    def dead_expert_steps(self) -> int | None: ...
    @property
    def excess_cv(self) -> float | None: ...
    @property
    def overload_factor(self) -> float | None: ...
    @property
    def sustained_steps(self) -> int: ...


@dataclass(frozen=True)
class Alert:
    """What is told of findings of one kind that begin at one step.

    Attributes:
        line: One line, for the console.
        title: Short, and different at each step: of one title, W&B sends one mail a minute.
        text: A line for each finding.
    """

    line: str
    title: str
    text: str


class AlertWatch:
    """Looks at each step of a run.

    Args:
        settings: From where on something is told.
        topk: Experts that a token goes to; None where that is not known.
    """

    def __init__(self, settings: AlertSettings, topk: int | None):
        thresholds = Thresholds(
            dead_expert_steps=settings.dead_expert_steps,
            excess_cv=settings.excess_cv,
            overload_factor=settings.overload_factor,
            sustained_steps=settings.sustained_steps,
        )
        self._tracker = FindingTracker(thresholds, topk)
        longest_streak = max(settings.dead_expert_steps or 0, settings.sustained_steps)
        # As far back as an episode may lie that the next step continues, and what it takes to be found.
        self._num_steps_to_replay = QUIET_STEPS + longest_streak

    def observe(
        self,
        step: int,
        metrics: Mapping[str, float],
        layers: Sequence[int] = (),
        counts: Int[np.ndarray, "layers experts"] | None = None,
    ) -> list[Alert]:
        """Takes the next step; one without training metrics, such as a validation before the first one, says nothing.

        Returns:
            What to tell of the findings that begin with it.
        """
        if not any(key.startswith("train/") for key in metrics):
            return []
        return alerts_of(step, self._tracker.observe(StepObservation(step, metrics, layers, counts)))

    def replay(self, run_folder: Path, last_step: int) -> None:
        """Takes the last steps that a resumed run has kept, and tells nothing: its user has been told.

        What cannot be read is passed over, and an episode that goes on may then be told again.
        """
        first_step = last_step - self._num_steps_to_replay + 1
        loads: dict[int, Int[np.ndarray, "layers experts"]] = {}
        layers: list[int] = []
        with suppress(OSError, DataError):
            steps, found, counts = read_load_arrays(run_folder, first_step)
            loads, layers = dict(zip(steps.tolist(), counts, strict=True)), found.tolist()
        with suppress(OSError, DataError):
            for record in read_metrics(run_folder / METRICS_FILE_NAME):
                if first_step <= record.step <= last_step:
                    self.observe(record.step, record.metrics, layers, loads.get(record.step))


def alerts_of(step: int, begun: Iterable[Finding]) -> list[Alert]:
    """One alert for each kind of the findings that begin at a step, however many layers have one."""
    by_kind = itertools.groupby(sorted(begun, key=lambda finding: finding.kind), key=lambda finding: finding.kind)
    return [_alert(step, kind.replace("_", " "), list(findings)) for kind, findings in by_kind]


def _alert(step: int, kind: str, findings: Sequence[Finding]) -> Alert:
    first, *others = findings
    line = f"step {step}: {first.text}{likewise(others)}"
    lines = [finding.text for finding in findings[:_MOST_LINES]]
    if len(findings) > _MOST_LINES:
        lines.append(f"and {len(findings) - _MOST_LINES} more layers")
    return Alert(line, f"{kind} at step {step}", "\n".join(lines))
