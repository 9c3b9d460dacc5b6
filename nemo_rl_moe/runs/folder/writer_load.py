# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""`experts_by_writer.parquet`: loads of every expert at every step, by who wrote the tokens (prompt, model, tool).

Its columns are `step`, `writer` (an index into `token_writers.WRITERS`), `layer`, `expert` and `count`. Steps without
tokens from an environment have no rows.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from nemo_rl_moe.runs.folder.step_tables import StepTable, StepTableWriter, read_steps
from nemo_rl_moe.shapes import Int
from nemo_rl_moe.token_writers import WRITERS

if TYPE_CHECKING:
    from nemo_rl_moe.routing.metrics.writers import WriterLoad

FOLDER_NAME = "experts_by_writer.parquet"
TABLE = StepTable(FOLDER_NAME, ("step", "writer", "layer", "expert"), {"count": pa.int64()})


@dataclass(frozen=True)
class WriterLoadHistory:
    """Load of each expert over the steps of a run, by the writer of the tokens: prompt, call, result or answer."""

    steps: Int[np.ndarray, " steps"]
    layers: Int[np.ndarray, " layers"]
    counts: Int[np.ndarray, "steps writers layers experts"]


class WriterLoadWriter(StepTableWriter["WriterLoad"]):
    table = TABLE

    def write(self, step: int, artifact: "WriterLoad") -> None:
        places = (range(len(WRITERS)), artifact.layers, range(artifact.counts.shape[-1]))
        self.add(step, places, {"count": artifact.counts})


def read_writer_load(run_folder: Path, first_step: int = 0) -> WriterLoadHistory:
    """Return the expert loads by the writer of the tokens that a run has written so far, from a step on.

    Raises:
        FileNotFoundError: There is no step from `first_step` on.
    """
    found = read_steps(TABLE, run_folder, first_step)
    steps, _, layers, _ = found.axes
    return WriterLoadHistory(steps, layers, found.values["count"])
