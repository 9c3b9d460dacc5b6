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
        # A resumed run finds single steps of its earlier attempts, which are joined with its own.
        self._single = [first for first, last in _files_in_force(self._folder) if first == last]

    def write(self, step: int, load: "ExpertLoad") -> None:
        """Adds one step; steps ascend."""
        if self._has_failed:
            return
        try:
            self._folder.mkdir(exist_ok=True)
            _write_whole(_as_table(step, load), _path(self._folder, step, step))
            self._single.append(step)
            if len(self._single) >= STEPS_OF_A_FILE:
                self._join()
        except (OSError, pa.ArrowException) as error:
            self._has_failed = True
            self._warn(f"{FOLDER_NAME} cannot be written and is left out from now on: {error}")

    def _join(self) -> None:
        """Makes one file of the single steps. A crash in between leaves both, which `read_expert_load` sorts out."""
        steps, self._single = self._single, []
        singles = [_path(self._folder, step, step) for step in steps]
        joined = pa.concat_tables([pq.read_table(path) for path in singles])
        _write_whole(joined, _path(self._folder, steps[0], steps[-1]))
        for path in singles:
            path.unlink()


def read_expert_load(run_folder: Path) -> pa.Table:
    """All rows that a run has written so far, each once, in the order of the steps.

    Raises:
        FileNotFoundError: The run has written none.
    """
    folder = run_folder / FOLDER_NAME
    in_force = _files_in_force(folder)
    if not in_force:
        raise FileNotFoundError(f"{folder} holds no step")
    table = pa.concat_tables([pq.read_table(_path(folder, *span), schema=_SCHEMA) for span in in_force])
    return table.take(pc.sort_indices(table, [("step", "ascending"), ("layer", "ascending"), ("expert", "ascending")]))


def rewind_expert_load(run_folder: Path, step: int) -> None:
    """Removes the rows of all later steps; a kill in between leaves what the next call finishes.

    A file that cannot be read is set aside under a name that readers pass over.
    """
    folder = run_folder / FOLDER_NAME
    in_force = _files_in_force(folder)
    for first, last in in_force:
        path = _path(folder, first, last)
        if first <= step < last:
            try:
                table = pq.read_table(path, schema=_SCHEMA)
            except (OSError, pa.ArrowException):
                path.replace(path.with_name(f".{path.name}.damaged"))
                continue
            kept = table.filter(pc.field("step") <= step)
            _write_whole(kept, _path(folder, first, max(kept["step"].to_pylist())))
        if last > step:
            path.unlink()
    for first, last in set(_spans(folder)) - set(_files_in_force(folder)):
        _path(folder, first, last).unlink()


def _path(folder: Path, first: int, last: int) -> Path:
    return folder / f"steps-{first:08d}-{last:08d}.parquet"


def _spans(folder: Path) -> list[tuple[int, int]]:
    """The first and last step of every file, ascending."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted((int(match[1]), int(match[2])) for name in names if (match := _FILE_NAME.fullmatch(name)))


def _files_in_force(folder: Path) -> list[tuple[int, int]]:
    """The spans of the files to read: those inside another one are left from a crash while files were joined or cut."""
    spans = _spans(folder)
    return [
        (first, last)
        for first, last in spans
        if not any(start <= first and last <= end and (start, end) != (first, last) for start, end in spans)
    ]


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
