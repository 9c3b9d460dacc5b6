# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The full load matrix of every step, as a Parquet data set that is whole at every moment.

`<run folder>/expert_load.parquet` is a folder of Parquet files, which pandas, pyarrow, polars and DuckDB read as one
table with the columns `step`, `layer`, `expert` and `count`. A Parquet file cannot be appended to, and one that a crash
cuts off cannot be read at all; so each step becomes a file of its own that appears whole, and now and then many become
one.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

if TYPE_CHECKING:
    # A reader of finished runs needs no torch.
    from nemo_rl_moe.models.policy.interfaces import ExpertLoad

FOLDER_NAME = "expert_load.parquet"
STEPS_OF_A_FILE = 100

_SCHEMA = pa.schema([("step", pa.int64()), ("layer", pa.int32()), ("expert", pa.int32()), ("count", pa.int64())])
_FILE_NAME = re.compile(r"steps-(\d{8})-(\d{8})\.parquet")


class ExpertLoadWriter:
    """Writes the load matrix of each step; what cannot be written warns once and never stops training.

    Args:
        run_folder: The run's folder.
        warn: Shows a warning.
    """

    def __init__(self, run_folder: Path, warn: Callable[[str], None]):
        self._folder = run_folder / FOLDER_NAME
        self._warn = warn
        self._has_failed = False
        self._single: list[int] = []

    def write(self, step: int, load: "ExpertLoad") -> None:
        """Adds one step; steps ascend."""
        if self._has_failed:
            return
        try:
            self._folder.mkdir(exist_ok=True)
            _write_whole(_as_table(step, load), self._path(step, step))
            self._single.append(step)
            if len(self._single) >= STEPS_OF_A_FILE:
                self._join()
        except (OSError, pa.ArrowException) as error:
            self._has_failed = True
            self._warn(f"{FOLDER_NAME} cannot be written and is left out from now on: {error}")

    def _path(self, first: int, last: int) -> Path:
        return self._folder / f"steps-{first:08d}-{last:08d}.parquet"

    def _join(self) -> None:
        """Makes one file of the single steps. A crash in between leaves both, which `read_expert_load` sorts out."""
        steps, self._single = self._single, []
        singles = [self._path(step, step) for step in steps]
        _write_whole(pa.concat_tables([pq.read_table(path) for path in singles]), self._path(steps[0], steps[-1]))
        for path in singles:
            path.unlink()


def read_expert_load(run_folder: Path) -> pa.Table:
    """All rows that a run has written so far, each once, in the order of the steps.

    Raises:
        FileNotFoundError: The run has written none.
    """
    ranges = {}
    for path in (run_folder / FOLDER_NAME).iterdir():
        if match := _FILE_NAME.fullmatch(path.name):
            ranges[path] = (int(match[1]), int(match[2]))
    joined = [span for span in ranges.values() if span[0] < span[1]]
    kept = [
        path
        for path, (first, last) in ranges.items()
        if first < last or not any(start <= first <= end for start, end in joined)
    ]
    if not kept:
        raise FileNotFoundError(f"{run_folder / FOLDER_NAME} holds no step")
    table = pa.concat_tables([pq.read_table(path, schema=_SCHEMA) for path in sorted(kept)])
    return table.take(pc.sort_indices(table, [("step", "ascending"), ("layer", "ascending"), ("expert", "ascending")]))


def _as_table(step: int, load: "ExpertLoad") -> pa.Table:
    num_layers, num_experts = load.counts.shape
    columns = {
        "step": np.full(num_layers * num_experts, step),
        "layer": np.repeat(load.layers, num_experts),
        "expert": np.tile(np.arange(num_experts), num_layers),
        "count": load.counts.reshape(-1).numpy(),
    }
    return pa.table(columns).cast(_SCHEMA)


def _write_whole(table: pa.Table, path: Path) -> None:
    # Readers of data sets skip names that begin with a dot.
    staging = path.with_name(f".{path.name}.incomplete")
    pq.write_table(table, staging, compression="zstd")
    staging.replace(path)
