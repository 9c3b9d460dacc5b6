# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""`expert_load.parquet`: expert loads of every step, with the columns `step`, `layer`, `expert` and `count`.

Runs of a model with vision also have the column `image_count`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from nemo_rl_moe.errors import DataError
from nemo_rl_moe.runs.folder.step_tables import StepTable, StepTableWriter, read_steps
from nemo_rl_moe.shapes import Int

if TYPE_CHECKING:
    # The report and the terminal view read these files without torch.
    from nemo_rl_moe.routing.metrics.load_statistics import ExpertLoad

FOLDER_NAME = "expert_load.parquet"
IMAGE_COUNT = "image_count"
TABLE = StepTable(FOLDER_NAME, ("step", "layer", "expert"), {"count": pa.int64()}, optional={IMAGE_COUNT: pa.int64()})


@dataclass(frozen=True)
class ExpertLoadHistory:
    """Load of every expert (number of routed tokens) over the steps of a run.

    Attributes:
        image_counts: Counts of image tokens. None if the run did not count them separately.
    """

    steps: Int[np.ndarray, " steps"]
    layers: Int[np.ndarray, " layers"]
    counts: Int[np.ndarray, "steps layers experts"]
    image_counts: Int[np.ndarray, "steps layers experts"] | None = None

    @property
    def num_experts(self) -> int:
        return int(self.counts.shape[2])

    def by_step(self) -> dict[int, Int[np.ndarray, "layers experts"]]:
        return dict(zip(self.steps.tolist(), self.counts, strict=True))


class ExpertLoadWriter(StepTableWriter["ExpertLoad"]):
    table = TABLE

    def write(self, step: int, artifact: "ExpertLoad") -> None:
        values = {"count": artifact.counts.numpy()}
        if artifact.image_counts is not None:
            values[IMAGE_COUNT] = artifact.image_counts.numpy()
        self.add(step, (artifact.layers, range(artifact.counts.shape[1])), values)


def read_expert_load(run_folder: Path, first_step: int = 0) -> ExpertLoadHistory:
    rows = read_steps(TABLE, run_folder, first_step)
    steps, layers, _ = rows.axes
    counts, image_counts = rows.values["count"], rows.values.get(IMAGE_COUNT)
    if image_counts is not None and (image_counts > counts).any():
        raise DataError(f"{run_folder / FOLDER_NAME}: {IMAGE_COUNT} is above count, which includes image tokens")
    return ExpertLoadHistory(steps, layers, counts, image_counts)


class ExpertLoadTail:
    """Reader of the expert load of a running run, which returns new steps at each call."""

    def __init__(self, run_folder: Path):
        self._run_folder = run_folder
        self._next_step = 0
        self.problems: list[str] = []

    def read(self, last_step: int) -> ExpertLoadHistory | None:
        """Return the new steps since the last call, up to `last_step`. None without new steps.

        If a file is damaged, `problems` names the file, and only `last_step` is read.
        """
        try:
            found = self._read(self._next_step, last_step)
        except DataError as error:
            self.problems = error.problems
            self._next_step = last_step + 1
            try:
                found = self._read(last_step, last_step)
            except DataError:
                found = None
        if found is not None:
            self._next_step = int(found.steps[-1]) + 1
        return found

    def _read(self, first_step: int, last_step: int) -> ExpertLoadHistory | None:
        try:
            found = read_expert_load(self._run_folder, first_step)
        except FileNotFoundError:
            return None
        number = int((found.steps <= last_step).sum())
        if not number:
            return None
        images = None if found.image_counts is None else found.image_counts[:number]
        return ExpertLoadHistory(found.steps[:number], found.layers, found.counts[:number], images)
