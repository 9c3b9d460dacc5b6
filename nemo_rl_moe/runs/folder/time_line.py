# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""`time_line.parquet`: activity of trainer and engines during each step of asynchronous rollouts.

A step is divided into `NUM_BINS` bins of equal length. The columns are `step`, `part` (0: trainer, 1: engines), `bin`,
`state` (the longest state in the bin, as an index into `TRAINER_STATES` or `ENGINE_STATES`), and `seconds`, the length
of the bin.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from nemo_rl_moe.runs.folder.step_tables import StepTable, StepTableWriter, read_steps
from nemo_rl_moe.shapes import Float, Int

TRAINER_STATES = ("training", "waits for rollouts", "updates weights", "validation")
ENGINE_STATES = ("generate", "wait for the environment", "paused", "wait for training", "validation")
TRAINING, WAITING, UPDATING, VALIDATING = range(4)
GENERATING, FOR_ENVIRONMENT, PAUSED, FOR_TRAINING, OF_VALIDATION = range(5)

NUM_BINS = 200
FOLDER_NAME = "time_line.parquet"
TABLE = StepTable(FOLDER_NAME, ("step", "part", "bin"), {"state": pa.int32(), "seconds": pa.float64()})


@dataclass(frozen=True)
class Interval:
    state: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class StepActivity:
    """Activity of trainer and engines in a step.

    Attributes:
        trainer: Intervals with states in `TRAINER_STATES`, from the step's start to its end without gaps.
        engines: The same with states in `ENGINE_STATES`.
    """

    trainer: Sequence[Interval]
    engines: Sequence[Interval]

    @property
    def start_s(self) -> float:
        return self.engines[0].start_s

    @property
    def seconds(self) -> float:
        return self.engines[-1].end_s - self.start_s


@dataclass(frozen=True)
class TimeLine:
    """Activity of trainer and engines in the last steps of a run, newest step last."""

    steps: Sequence[StepActivity]


class TimeLineWriter(StepTableWriter[TimeLine]):
    table = TABLE

    def write(self, step: int, artifact: TimeLine) -> None:
        found = artifact.steps[-1]
        states = np.stack([binned(found.trainer, NUM_BINS), binned(found.engines, NUM_BINS)])
        seconds = np.full(states.shape, found.seconds / NUM_BINS)
        self.add(step, (range(2), range(NUM_BINS)), {"state": states, "seconds": seconds})


@dataclass(frozen=True)
class TimeLineHistory:
    """Activity of trainer and engines over the steps of a run.

    Attributes:
        states: State of the trainer (index 0) and of the engines (1) in each bin of a step, as an index into
            `TRAINER_STATES` or `ENGINE_STATES`.
        seconds: Duration of each step in seconds.
    """

    steps: Int[np.ndarray, " steps"]
    states: Int[np.ndarray, "steps 2 bins"]
    seconds: Float[np.ndarray, " steps"]


def read_time_line(run_folder: Path, first_step: int = 0) -> TimeLineHistory:
    """Return the activity of trainer and engines that a run has written so far, from a step on.

    Raises:
        FileNotFoundError: There is no step from `first_step` on.
    """
    found = read_steps(TABLE, run_folder, first_step)
    return TimeLineHistory(found.axes[0], found.values["state"], found.values["seconds"][:, 0].sum(-1))


def seconds_of(intervals: Sequence[Interval], state: int) -> float:
    """Return the number of seconds that intervals spend in a state."""
    return sum(each.end_s - each.start_s for each in intervals if each.state == state)


def binned(intervals: Sequence[Interval], num_bins: int) -> Int[np.ndarray, " bins"]:
    """Return, for each bin, the state with the most seconds.

    If states have equal seconds, the state with the lowest number wins. Requires intervals without gaps.
    """
    start_s, end_s = intervals[0].start_s, intervals[-1].end_s
    if end_s <= start_s:
        return np.full(num_bins, intervals[-1].state)
    edges = np.array([intervals[0].start_s, *(each.end_s for each in intervals)])
    bounds = np.linspace(start_s, end_s, num_bins + 1)
    states = np.array([each.state for each in intervals])
    seconds = np.zeros((states.max() + 1, num_bins))
    for state in np.unique(states):
        # Seconds in the state up to each edge, which are linear between edges.
        upto = np.concatenate([[0.0], np.cumsum(np.where(states == state, np.diff(edges), 0.0))])
        seconds[state] = np.diff(np.interp(bounds, edges, upto))
    return np.argmax(seconds, axis=0)
