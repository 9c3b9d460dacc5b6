# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Tables to which a run adds rows at every step: writer, reader and rewind.

`<run folder>/<name>.parquet` is a folder of Parquet files, which pandas, pyarrow, polars and DuckDB read as one table.
Nothing can be appended to a Parquet file. So each step is written to a new file, which is complete when it appears.
Steps that follow quickly share a file, and the files of 100 steps are joined into one.
"""

import math
import re
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Generic

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from nemo_rl_moe.errors import DataError, one_line
from nemo_rl_moe.runs.folder.artifacts import Artifact
from nemo_rl_moe.shapes import Int

STEPS_OF_A_FILE = 100
MAX_DELAY_S = 5.0
"""Steps wait in memory until the last file has this age in seconds. A killed process loses waiting steps."""
_MOST_STEPS_KEPT = 1000
_MOST_ROWS = 20_000_000  # 100 steps of a model with 200 layers of 1,000 experts
_UNREADABLE = (OSError, ValueError, pa.ArrowException)
_FILE_NAME = re.compile(r"steps-(\d{8})-(\d{8})\.parquet")


@dataclass(frozen=True)
class StepTable:
    """Layout of a table. At each step, it has a row for each combination of its other axes, such as layer and expert.

    Attributes:
        values: Name -> type of the columns that are not axes: counts, or shares, which may be NaN.
        is_signed: Whether the values may be negative.
        optional: Name -> type of columns that a run may lack.
    """

    folder_name: str
    axes: tuple[str, ...]
    values: Mapping[str, pa.DataType]
    is_signed: bool = False
    optional: Mapping[str, pa.DataType] = field(default_factory=dict)

    def schema(self, names: Collection[str]) -> pa.Schema:
        """Return the schema of a file with the given optional columns."""
        axes = [(axis, pa.int64() if axis == "step" else pa.int32()) for axis in self.axes]
        more = [(name, of) for name, of in self.optional.items() if name in names]
        return pa.schema([*axes, *self.values.items(), *more])


@dataclass(frozen=True)
class StepRows:
    axes: tuple[Int[np.ndarray, " places"], ...]
    values: Mapping[str, NDArray[Any]]

    def since(self, step: int) -> "StepRows":
        """Return the rows of the steps from `step` on."""
        later = self.axes[0] >= step
        if later.all():
            return self
        return StepRows((self.axes[0][later], *self.axes[1:]), {name: of[later] for name, of in self.values.items()})


class StepTableWriter(ABC, Generic[Artifact]):
    """Writer of a table. Its subclasses convert the artifact of a step to rows.

    If the disk is full, the newest 1,000 steps wait in memory until there is space again, and training continues.
    """

    table: ClassVar[StepTable]
    line_files: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        run_folder: Path,
        warn: Callable[[str], None],
        message: Callable[[str], None] = lambda text: None,
        *,
        max_delay_s: float = 0.0,
    ):
        self._name, self._folder = self.table.folder_name, run_folder / self.table.folder_name
        self._warn, self._message = warn, message
        self._kept: deque[StepRows] = deque()
        self._num_lost = 0
        self._is_failing = False
        self._has_reported_of_joining = False
        self._max_delay_s, self._written_at = max_delay_s, -math.inf
        # A resumed run joins its earlier short files with the new ones.
        self._short = [span for span in _files_in_force(self._folder) if span[1] - span[0] < STEPS_OF_A_FILE - 1]

    @abstractmethod
    def write(self, step: int, artifact: Artifact) -> None:
        """Add one step. Steps must ascend."""

    def add(self, step: int, axes: Sequence[Sequence[int]], values: Mapping[str, NDArray[Any]]) -> None:
        """Add the rows of a step.

        Args:
            axes: Numbers on each axis except the step, such as the layers and the experts.
            values: Column -> array with one dimension for each of these axes.
        """
        all_axes = (np.array([step]), *map(np.asarray, axes))
        self._kept.append(StepRows(all_axes, {name: of_step[None] for name, of_step in values.items()}))
        if len(self._kept) > _MOST_STEPS_KEPT:
            self._kept.popleft()
            self._num_lost += 1
        if time.monotonic() - self._written_at >= self._max_delay_s:
            self._write_kept()

    def flush(self) -> None:
        if self._kept:
            self._write_kept()

    def close(self) -> None:
        self.flush()
        if lost := self._num_lost + len(self._kept):
            self._warn(f"{self._name} lacks {lost} steps that could not be written")
        self._kept.clear()
        self._num_lost = 0

    def _write_kept(self) -> None:
        try:
            if not self._folder.is_dir():
                for folder in (self._folder.parent, self._folder):
                    folder.mkdir(exist_ok=True)
            while self._kept:
                rows = _joined(list(islice(self._kept, STEPS_OF_A_FILE)))
                first, last = int(rows.axes[0][0]), int(rows.axes[0][-1])
                # Uncompressed, since the file is joined soon, and compression takes as long as writing.
                _write_whole(_as_file(self.table, rows), _path(self._folder, first, last), compression="none")
                self._written_at = time.monotonic()
                self._short.append((first, last))
                for _ in rows.axes[0]:
                    self._kept.popleft()
                if sum(last - first + 1 for first, last in self._short) >= STEPS_OF_A_FILE:
                    self._join()
        except (OSError, pa.ArrowException) as error:
            if not self._is_failing:
                self._is_failing = True
                self._warn(f"{self._name} cannot be written, its steps are kept until it can be: {error}")
            return
        if self._is_failing:
            self._is_failing = False
            self._message(f"{self._name} can be written again")

    def _join(self) -> None:
        """Join short files into one. If the process is killed in between, readers prefer the joined file."""
        spans, self._short = self._short, []
        (first, _), (_, last) = spans[0], spans[-1]
        if len(spans) == 1:
            return
        paths = [_path(self._folder, *span) for span in spans]
        try:
            joined = pa.concat_tables([pq.read_table(path) for path in paths])
            _write_whole(joined, _path(self._folder, first, last))
            for path in paths:
                path.unlink()
        except (OSError, pa.ArrowException) as error:
            # No rows are lost: readers take the single files.
            if not self._has_reported_of_joining:
                self._has_reported_of_joining = True
                self._warn(f"{self._name}: the files of steps {first} to {last} cannot be joined: {error}")


def read_steps(table: StepTable, run_folder: Path, first_step: int = 0) -> StepRows:
    """Return the rows that a run has written so far. Each step occurs once, even if the run was killed."""
    folder = run_folder / table.folder_name
    parts: list[StepRows] = []
    # Files are read one by one, since Arrow's rows of all steps would take several times the memory of their values.
    for first, last in _files_in_force(folder):
        if last < first_step:
            continue
        path = _path(folder, first, last)
        try:
            part = _as_rows(table, _file(table, path), last)
            if parts and part.values.keys() != parts[0].values.keys():
                raise ValueError("it has other columns than the first file")
            if parts and not all(map(np.array_equal, part.axes[1:], parts[0].axes[1:])):
                raise ValueError(f"it has other {' or '.join(_plurals(table.axes[1:]))} than the first file")
        except FileNotFoundError:  # the run has meanwhile joined it with other files
            return read_steps(table, run_folder, first_step)
        except _UNREADABLE as error:
            raise DataError(f"{path}: cannot be read: {one_line(error)}") from None
        parts.append(part.since(first_step))
    if not parts:
        raise FileNotFoundError(f"{folder} holds no step")
    return _joined(parts)


def rewind_steps(table: StepTable, run_folder: Path, step: int) -> None:
    """Remove the rows of all steps after `step`.

    If the process is killed in between, the next call finishes the work. A damaged file is renamed, so that readers
    skip it.

    Raises:
        OSError: A file cannot be removed, or the kept beginning of a file cannot be written.
    """
    folder = run_folder / table.folder_name
    # The last files first, since the cut file may need their space on the disk.
    for first, last in reversed(_files_in_force(folder)):
        path = _path(folder, first, last)
        if first <= step < last:
            try:
                found = _file(table, path)
                steps = _as_rows(table, found, last).axes[0]
            except _UNREADABLE:
                path.replace(path.with_name(f".{path.name}.damaged"))
                continue
            kept = found.filter(pc.field("step") <= step)
            _write_whole(kept, _path(folder, first, int(steps[steps <= step][-1])))
        if last > step:
            path.unlink()
    for first, last in set(_spans(folder)) - set(_files_in_force(folder)):
        _path(folder, first, last).unlink()


def _path(folder: Path, first: int, last: int) -> Path:
    return folder / f"steps-{first:08d}-{last:08d}.parquet"


def _spans(folder: Path) -> list[tuple[int, int]]:
    """Return (first step, last step) of every file, in ascending order."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    spans = [(int(match[1]), int(match[2])) for name in names if (match := _FILE_NAME.fullmatch(name))]
    return sorted((first, last) for first, last in spans if first <= last)


def _files_in_force(folder: Path) -> list[tuple[int, int]]:
    """Return (first step, last step) of the files to read.

    A file whose span of steps lies inside the span of another file is skipped. Such a file remains if a run was killed
    while it joined or cut files.
    """
    spans = _spans(folder)
    return [
        (first, last)
        for first, last in spans
        if not any(start <= first and last <= end and (start, end) != (first, last) for start, end in spans)
    ]


def _plurals(axes: tuple[str, ...]) -> list[str]:
    return [f"{axis}s" for axis in axes]


def _joined(parts: Sequence[StepRows]) -> StepRows:
    """Return concatenated rows of successive steps whose other axes are the same."""
    if len(parts) == 1:
        return parts[0]
    steps = np.concatenate([part.axes[0] for part in parts])
    values = {name: np.concatenate([part.values[name] for part in parts]) for name in parts[0].values}
    return StepRows((steps, *parts[0].axes[1:]), values)


def _as_file(table: StepTable, rows: StepRows) -> pa.Table:
    shape = tuple(map(len, rows.axes))
    columns = [np.broadcast_to(numbers, shape).reshape(-1) for numbers in np.ix_(*rows.axes)]
    schema = table.schema(rows.values)
    columns += [rows.values[name].reshape(-1) for name in schema.names[len(table.axes) :]]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
    return pa.Table.from_arrays(arrays, schema=schema)


def _write_whole(content: pa.Table, path: Path, compression: str = "zstd") -> None:
    # Readers of data sets ignore names that begin with a dot.
    staging = path.with_name(f".{path.name}.incomplete")
    # Dictionaries save nothing with few rows, and no reader needs statistics. Together they take half of the time.
    pq.write_table(content, staging, compression=compression, use_dictionary=False, write_statistics=False)
    staging.replace(path)


def _file(table: StepTable, path: Path) -> pa.Table:
    metadata = pq.read_metadata(path)
    if metadata.num_rows > _MOST_ROWS:
        raise ValueError(f"{metadata.num_rows:,} rows, expected at most {_MOST_ROWS:,}")
    return pq.read_table(path, schema=table.schema(metadata.schema.names))


def _as_rows(table: StepTable, content: pa.Table, last: int) -> StepRows:
    """Check the content of a file, whose last step must be `last`, and return its rows."""
    if any(column.null_count for column in content.columns):
        raise ValueError("it has rows without a number")
    numbers = [content[axis].to_numpy() for axis in table.axes]
    axes = tuple(np.unique(column).astype(np.int64) for column in numbers)
    shape = tuple(map(len, axes))
    if not (shape[0] and axes[0][-1] == last and len(content) == math.prod(shape)):
        raise ValueError("its steps have different numbers of rows")
    names = content.column_names[len(axes) :]
    values = {name: content[name].to_numpy().reshape(shape) for name in names}
    is_in_order = all(
        np.array_equal(found.reshape(shape), np.broadcast_to(expected, shape))
        for found, expected in zip(numbers, np.ix_(*axes), strict=True)
    )
    is_negative = not table.is_signed and any((of_column < 0).any() for of_column in values.values())
    if not is_in_order or is_negative:
        *others, innermost = _plurals(table.axes)
        order = f"{', '.join(others)} and {innermost}"
        raise ValueError(f"its rows are not in the order of {order}, or have negative counts")
    return StepRows(axes, values)
