# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""`expert_load.parquet`: the load matrix of every step, its writer, its readers and its rewind.

`<run folder>/expert_load.parquet` is a folder of Parquet files, which pandas, pyarrow, polars and DuckDB read as one
table with the columns `step`, `layer`, `expert` and `count`. A Parquet file cannot be appended to, and one that a kill
leaves half written cannot be read at all. Each step is therefore written to a file of its own that appears whole, and
every 100 of these files are joined into one.
"""

import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from jaxtyping import Int

from nemo_rl_moe.errors import DataError, one_line

if TYPE_CHECKING:
    # The report and the terminal view read these files without torch.
    from nemo_rl_moe.moe.load_statistics import ExpertLoad

FOLDER_NAME = "expert_load.parquet"
STEPS_OF_A_FILE = 100
_MOST_STEPS_KEPT = 1000
_MOST_ROWS = 20_000_000  # a file of 100 steps of a model of 200 layers with 1,000 experts each
_UNREADABLE = (OSError, ValueError, pa.ArrowException)

_SCHEMA = pa.schema([("step", pa.int64()), ("layer", pa.int32()), ("expert", pa.int32()), ("count", pa.int64())])
_FILE_NAME = re.compile(r"steps-(\d{8})-(\d{8})\.parquet")


@dataclass(frozen=True)
class ExpertLoadHistory:
    """Load of every expert over the steps of a run.

    Attributes:
        steps: Ascending.
        layers: Index of each MoE layer in the whole model, ascending.
        counts: Assignments of each expert, each real token `topk` times.
    """

    steps: Int[np.ndarray, " steps"]
    layers: Int[np.ndarray, " layers"]
    counts: Int[np.ndarray, "steps layers experts"]

    @property
    def num_experts(self) -> int:
        """Routed experts of a layer."""
        return int(self.counts.shape[2])

    def since(self, step: int) -> "ExpertLoadHistory":
        """The same from a step on."""
        later = self.steps >= step
        return self if later.all() else ExpertLoadHistory(self.steps[later], self.layers, self.counts[later])


class ExpertLoadWriter:
    """Writer of the load matrix of each step.

    Survives a full disk: the newest 1,000 steps are kept in memory meanwhile and written when there is space again;
    training goes on.

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
        # The files of single steps that the run wrote before it was resumed are joined with the new ones.
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
        """Joins the files of single steps into one. Survives a kill in between: readers prefer the joined file."""
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


def read_expert_load(run_folder: Path, first_step: int = 0) -> ExpertLoadHistory:
    """The expert load that a run has written so far, each step once.

    Args:
        run_folder: The run's folder.
        first_step: The first step to read.

    Raises:
        FileNotFoundError: There is no such step.
        DataError: A file is damaged, for example by a copy that was interrupted.
    """
    folder = run_folder / FOLDER_NAME
    parts: list[ExpertLoadHistory] = []
    # File by file: the rows of all steps together would take several times the memory of the counts.
    for first, last in _files_in_force(folder):
        if last < first_step:
            continue
        path = _path(folder, first, last)
        try:
            part = _as_history(_table(path), last)
            if parts and (part.counts.shape[1:], *part.layers) != (parts[0].counts.shape[1:], *parts[0].layers):
                raise ValueError("it has other layers or experts than the first one")
        except FileNotFoundError:  # joined with others since it was listed: the joined file is there by now
            return read_expert_load(run_folder, first_step)
        except _UNREADABLE as error:
            raise DataError(f"{path}: cannot be read: {one_line(error)}") from None
        parts.append(part.since(first_step))
    if not parts:
        raise FileNotFoundError(f"{folder} holds no step")
    steps, counts = (np.concatenate([getattr(part, name) for part in parts]) for name in ("steps", "counts"))
    return ExpertLoadHistory(steps, parts[0].layers, counts)


class ExpertLoadTail:
    """Follower of the expert load of a run that goes on.

    Args:
        run_folder: The run's folder.
    """

    def __init__(self, run_folder: Path):
        self._run_folder = run_folder
        self._next_step = 0
        self.problems: list[str] = []

    def read(self, last_step: int) -> ExpertLoadHistory | None:
        """Steps written since the last call; None where there are none.

        Behind a damaged file only `last_step` is read, and `problems` names the file.

        Args:
            last_step: The last step to take: later ones may be left from before the run was resumed.
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
        return ExpertLoadHistory(found.steps[:number], found.layers, found.counts[:number]) if number else None


def rewind_expert_load(run_folder: Path, step: int) -> None:
    """Removes the rows of all later steps.

    Survives a kill in between: the next call finishes what is left. A damaged file is renamed so that readers skip it.

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
                table = _table(path)
                steps = _as_history(table, last).steps
            except _UNREADABLE:
                path.replace(path.with_name(f".{path.name}.damaged"))
                continue
            kept = table.filter(pc.field("step") <= step)
            _write_whole(kept, _path(folder, first, int(steps[steps <= step][-1])))
        if last > step:
            path.unlink()
    for first, last in set(_spans(folder)) - set(_files_in_force(folder)):
        _path(folder, first, last).unlink()


def _path(folder: Path, first: int, last: int) -> Path:
    return folder / f"steps-{first:08d}-{last:08d}.parquet"


def _spans(folder: Path) -> list[tuple[int, int]]:
    """First and last step of every file, ascending."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    spans = [(int(match[1]), int(match[2])) for name in names if (match := _FILE_NAME.fullmatch(name))]
    return sorted((first, last) for first, last in spans if first <= last)


def _files_in_force(folder: Path) -> list[tuple[int, int]]:
    """Spans of the files to read. One inside another is left from a kill while files were joined or cut."""
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


def _table(path: Path) -> pa.Table:
    """Rows of one file.

    Raises:
        ValueError: They are more than its steps can have: some kilobytes may say that there are billions.
    """
    num_rows = pq.read_metadata(path).num_rows
    if num_rows > _MOST_ROWS:
        raise ValueError(f"{num_rows:,} rows, expected at most {_MOST_ROWS:,}")
    return pq.read_table(path, schema=_SCHEMA)


def _as_history(table: pa.Table, last: int) -> ExpertLoadHistory:
    """The counts of one file.

    Args:
        table: Its rows.
        last: The last step, by its name.

    Raises:
        ValueError: They are no load matrix for each step.
    """
    if any(table[name].null_count for name in _SCHEMA.names):
        raise ValueError("it has rows without a number")
    step, layer, expert, count = (table[name].to_numpy() for name in _SCHEMA.names)
    steps, layers, experts = (np.unique(column).astype(np.int64) for column in (step, layer, expert))
    if not (len(steps) and steps[-1] == last and len(table) == len(steps) * len(layers) * len(experts)):
        raise ValueError("it does not hold as many rows for each of its steps")
    shape = (len(steps), len(layers), len(experts))
    rows = zip((step, layer, expert), np.ix_(steps, layers, experts), strict=True)
    if (count < 0).any() or not all(
        np.array_equal(found.reshape(shape), np.broadcast_to(a, shape)) for found, a in rows
    ):
        raise ValueError("its rows are not in the order of steps, layers and experts, or count less than nothing")
    return ExpertLoadHistory(steps, layers, count.reshape(shape))
