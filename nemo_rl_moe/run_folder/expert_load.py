# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The full load matrix of every step, as a Parquet data set that is whole at every moment.

`<run folder>/expert_load.parquet` is a folder of Parquet files, which pandas, pyarrow, polars and DuckDB read as one
table with the columns `step`, `layer`, `expert` and `count`. A Parquet file cannot be appended to, and one that a crash
cuts off cannot be read at all; so each step becomes a file of its own that appears whole, and now and then many become
one.
"""

import re
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from jaxtyping import Int
from numpy.typing import NDArray

from nemo_rl_moe.errors import DataError

if TYPE_CHECKING:
    # A reader of finished runs needs no torch.
    from nemo_rl_moe.moe.load_statistics import ExpertLoad


FOLDER_NAME = "expert_load.parquet"
STEPS_OF_A_FILE = 100
_MOST_STEPS_KEPT = 1000
_MOST_COUNT = 2**32 - 1

_SCHEMA = pa.schema([("step", pa.int64()), ("layer", pa.int32()), ("expert", pa.int32()), ("count", pa.int64())])
_FILE_NAME = re.compile(r"steps-(\d{8})-(\d{8})\.parquet")


class ExpertLoadWriter:
    """Writes the load matrix of each step; what cannot be written never stops training.

    While the disk is full, the newest steps are kept in memory, and written when there is space again.

    Args:
        run_folder: The run's folder.
        warn: Told once when writing fails, and when steps are lost.
        message: Told when writing works again.
    """

    def __init__(
        self, run_folder: Path, warn: Callable[[str], None], message: Callable[[str], None] = lambda text: None
    ):
        self._folder = run_folder / FOLDER_NAME
        self._warn, self._message = warn, message
        self._kept: deque[tuple[int, ExpertLoad]] = deque()
        self._num_lost = 0
        self._is_failing = False
        self._has_told_of_joining = False
        # A resumed run finds single steps of its earlier attempts, which are joined with its own.
        self._single = [first for first, last in _files_in_force(self._folder) if first == last]

    def write(self, step: int, load: "ExpertLoad") -> None:
        """Adds one step; steps ascend."""
        self._kept.append((step, load))
        if len(self._kept) > _MOST_STEPS_KEPT:
            self._kept.popleft()
            self._num_lost += 1
        self._write_kept()

    def close(self) -> None:
        """Tries once more to write what is kept."""
        if self._kept:
            self._write_kept()
        if lost := self._num_lost + len(self._kept):
            self._warn(f"{FOLDER_NAME} lacks {lost} steps that could not be written")
        self._kept.clear()
        self._num_lost = 0

    def _write_kept(self) -> None:
        try:
            self._folder.mkdir(exist_ok=True)
            while self._kept:
                step, load = self._kept[0]
                _write_whole(_as_table(step, load), _path(self._folder, step, step))
                self._single.append(step)
                self._kept.popleft()
                if len(self._single) >= STEPS_OF_A_FILE:
                    self._join()
        except (OSError, pa.ArrowException) as error:
            if not self._is_failing:
                self._is_failing = True
                self._warn(f"{FOLDER_NAME} cannot be written, its steps are kept until it can be: {error}")
            return
        if self._is_failing:
            self._is_failing = False
            self._message(f"{FOLDER_NAME} can be written again")

    def _join(self) -> None:
        """Makes one file of the single steps. A crash in between leaves both, which `read_expert_load` sorts out."""
        steps, self._single = self._single, []
        singles = [_path(self._folder, step, step) for step in steps]
        try:
            joined = pa.concat_tables([pq.read_table(path) for path in singles])
            _write_whole(joined, _path(self._folder, steps[0], steps[-1]))
            for path in singles:
                path.unlink()
        except (OSError, pa.ArrowException) as error:
            # Nothing is lost by it: they are read as they are.
            if not self._has_told_of_joining:
                self._has_told_of_joining = True
                self._warn(f"{FOLDER_NAME}: the files of steps {steps[0]} to {steps[-1]} cannot be joined: {error}")


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


def read_load_arrays(
    run_folder: Path, first_step: int = 0
) -> tuple[Int[np.ndarray, " steps"], Int[np.ndarray, " layers"], Int[np.ndarray, "steps layers experts"]]:
    """The same as arrays: steps, layers' indices, and counts. Takes a fraction of the memory of all rows.

    Args:
        run_folder: The run's folder.
        first_step: The first step to read.

    Raises:
        FileNotFoundError: The run has written none.
        DataError: A file is damaged, holds what no count of tokens can be, or its steps differ in their layers or
            experts.
    """
    folder = run_folder / FOLDER_NAME
    in_force = [(first, last) for first, last in _files_in_force(folder) if last >= first_step]
    if not in_force:
        raise FileNotFoundError(f"{folder} holds no step")
    steps, counts = [], []
    layers: NDArray[np.int64] | None = None
    for span in in_force:
        path = _path(folder, *span)
        try:
            table = pq.read_table(path, schema=_SCHEMA, filters=[("step", ">=", first_step)])
        except FileNotFoundError:  # joined with others meanwhile; what the run goes on with is read the next time
            continue
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{path}: cannot be read: {' '.join(str(error).split())}") from None
        if problem := _problem(table, *span):
            raise DataError(f"{path}: {problem}")
        found = _as_arrays(table)
        if found is None or (layers is not None and not np.array_equal(found[1], layers)):
            raise DataError(f"{path}: its rows are not the layers and experts of whole steps, or not those of others")
        steps.append(found[0])
        layers = found[1]
        counts.append(found[2])
    if layers is None:
        raise FileNotFoundError(f"{folder} holds no step")
    try:
        all_steps, all_counts = np.concatenate(steps), np.concatenate(counts)
    except ValueError:
        raise DataError(f"{folder}: its files differ in their number of experts") from None
    if (np.diff(all_steps) <= 0).any():
        raise DataError(f"{folder}: its files overlap in their steps")
    return all_steps, layers, all_counts


def _problem(table: pa.Table, first: int, last: int) -> str | None:
    """What is wrong with the values of a file of these steps; None where nothing is."""
    if not table.num_rows:
        return "holds no row"
    for name in _SCHEMA.names:
        if table[name].null_count:
            return f"column {name!r} is missing, or lacks values"
    for name, lowest, highest in (("step", first, last), ("count", 0, _MOST_COUNT)):
        found = pc.min_max(table[name]).as_py()
        if found["min"] < lowest or found["max"] > highest:
            return f"column {name!r} is from {lowest} to {highest}, got {found['min']} to {found['max']}"
    return None


def _as_arrays(table: pa.Table) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]] | None:
    """Steps, layers and counts of rows in their order; None where they are anything but whole steps."""
    step, layer, expert, count = (table[name].to_numpy() for name in ("step", "layer", "expert", "count"))
    steps, layers, experts = np.unique(step), np.unique(layer), np.unique(expert)
    shape = len(steps), len(layers), len(experts)
    if len(count) != np.prod(shape):
        return None
    rows = [axis.reshape(shape) for axis in (step, layer, expert)]
    whole = np.broadcast_arrays(steps[:, None, None], layers[None, :, None], experts[None, None])
    if not all(np.array_equal(row, axis) for row, axis in zip(rows, whole, strict=True)):
        return None
    return steps, layers.astype(np.int64), count.reshape(shape)


def rewind_expert_load(run_folder: Path, step: int) -> None:
    """Removes the rows of all later steps; a kill in between leaves what the next call finishes.

    A file that cannot be read is set aside under a name that readers pass over.

    Raises:
        OSError: A file cannot be removed, or the beginning of a file that is kept cannot be written.
    """
    folder = run_folder / FOLDER_NAME
    in_force = _files_in_force(folder)
    # The last files first: their space may be what the cut one needs.
    for first, last in reversed(in_force):
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
