# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What is new in a run's folder since the last look at it."""

from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from nemo_rl_moe.errors import DataError
from nemo_rl_moe.loggers.expert_load import read_load_arrays
from nemo_rl_moe.loggers.jsonl import StepRecord, parse_record
from nemo_rl_moe.report.run_data import ExpertLoadHistory

_MOST_REMEMBERED_BYTES = 1 << 16


@dataclass(frozen=True)
class NewRecords:
    """New lines of a file of metrics.

    Attributes:
        records: In the order of the file.
        begins_anew: Whether the file has been cut or replaced: these are all that it holds, and earlier ones are void.
        num_damaged: Lines that are no records.
    """

    records: list[StepRecord]
    begins_anew: bool
    num_damaged: int


class MetricsTail:
    """Follows `metrics.jsonl`; a last line without its end is left for the next look.

    Args:
        path: The file, which need not be there yet.
    """

    def __init__(self, path: Path):
        self._path = path
        self._offset = 0
        self._last_bytes = b""

    def read(self) -> NewRecords:
        """The lines that have been written since the last call.

        Raises:
            DataError: The file cannot be read.
        """
        try:
            with self._path.open("rb") as file:
                return self._read(file)
        except FileNotFoundError:
            return NewRecords([], False, 0)
        except OSError as error:
            raise DataError(f"{self._path}: cannot be read: {error.strerror}") from None

    def _read(self, file: BinaryIO) -> NewRecords:
        # A run that was resumed has cut the file, and may have grown it beyond its former length since.
        file.seek(self._offset - len(self._last_bytes))
        begins_anew = file.read(len(self._last_bytes)) != self._last_bytes
        if begins_anew:
            self._offset, self._last_bytes = file.seek(0), b""
        records: list[StepRecord] = []
        num_damaged = 0
        for line in file:
            if not line.endswith(b"\n"):
                break
            self._offset += len(line)
            self._last_bytes = line[-_MOST_REMEMBERED_BYTES:]
            try:
                if line.strip():
                    records.append(parse_record(line, str(self._path)))
            except DataError:
                num_damaged += 1
        return NewRecords(records, begins_anew, num_damaged)


class ExpertLoadTail:
    """Follows the files of the expert load.

    Args:
        run_folder: The run's folder.
    """

    def __init__(self, run_folder: Path):
        self._run_folder = run_folder
        self._next_step = 0
        self.problems: list[str] = []

    def read(self, last_step: int) -> ExpertLoadHistory | None:
        """The steps that have been written since the last call.

        Args:
            last_step: The last step to take: later ones may be left from before the run was resumed.

        Returns:
            None where there are none. Behind a file that is damaged, only `last_step`; `problems` then says which.
        """
        try:
            found = self._read(last_step)
            if found is None or not self._is_whole(found):
                # Files are joined now and then: some that were listed may have gone before they were opened.
                found = self._read(last_step)
        except (DataError, OSError) as error:
            self.problems = error.problems if isinstance(error, DataError) else [str(error)]
            self._next_step = max(self._next_step, last_step)
            try:
                found = self._read(last_step)
            except (DataError, OSError):
                self._next_step, found = last_step + 1, None
        if found is not None:
            self._next_step = int(found.steps[-1]) + 1
        return found

    def _read(self, last_step: int) -> ExpertLoadHistory | None:
        try:
            steps, layers, counts = read_load_arrays(self._run_folder, self._next_step)
        except FileNotFoundError:
            return None
        number = int((steps <= last_step).sum())
        return ExpertLoadHistory(steps[:number], layers, counts[:number]) if number else None

    def _is_whole(self, found: ExpertLoadHistory) -> bool:
        first = self._next_step or int(found.steps[0])
        return len(found.steps) == int(found.steps[-1]) - first + 1
