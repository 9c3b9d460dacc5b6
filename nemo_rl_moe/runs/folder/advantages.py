# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""`experts_by_advantage.parquet`: the score of every expert at every step.

Its columns are `step`, `layer`, `expert` and `score`. The score is the number of standard deviations, relative to
chance, by which the expert's share of the tokens is larger in responses with a high advantage than in others.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from nemo_rl_moe.runs.folder.step_tables import StepTable, StepTableWriter, read_steps
from nemo_rl_moe.shapes import Float, Int

if TYPE_CHECKING:
    # The report reads these files without torch.
    from nemo_rl_moe.routing.metrics.routing_advantage import AdvantageScores

FOLDER_NAME = "experts_by_advantage.parquet"
TABLE = StepTable(FOLDER_NAME, ("step", "layer", "expert"), {"score": pa.float32()}, is_signed=True)


@dataclass(frozen=True)
class AdvantageHistory:
    """How much more each expert is used in responses with a high advantage, as a score for each step of a run.

    Attributes:
        scores: Number of standard deviations above the use by chance. NaN if unknown.
    """

    steps: Int[np.ndarray, " steps"]
    layers: Int[np.ndarray, " layers"]
    scores: Float[np.ndarray, "steps layers experts"]


class AdvantageWriter(StepTableWriter["AdvantageScores"]):
    table = TABLE

    def write(self, step: int, artifact: "AdvantageScores") -> None:
        scores = artifact.scores.numpy().astype(np.float32)
        self.add(step, (artifact.layers, range(scores.shape[1])), {"score": scores})


def read_advantages(run_folder: Path, first_step: int = 0) -> AdvantageHistory:
    """Return the scores of experts by advantage that a run has written so far, from a step on.

    Raises:
        FileNotFoundError: There is no step from `first_step` on.
    """
    found = read_steps(TABLE, run_folder, first_step)
    steps, layers, _ = found.axes
    return AdvantageHistory(steps, layers, found.values["score"])
