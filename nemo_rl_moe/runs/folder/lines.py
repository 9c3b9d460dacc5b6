# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Text files with one record per line: atomic appends, rewind on resume, robust against a full disk."""

import contextlib
import json
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from io import FileIO
from pathlib import Path
from typing import Any


def to_plain(value: Any) -> Any:
    """Return nested values as dicts, lists, strings, numbers, booleans and None. Other objects become their `str`."""
    if isinstance(value, Enum):
        return to_plain(value.value)
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


_MOST_BYTES_KEPT = 64 * 2**20


def append_whole(file: FileIO, record: bytes) -> None:
    """Append a complete record to an unbuffered file. If an error comes in between, cut the written part off again."""
    end = file.seek(0, os.SEEK_END)
    rest = memoryview(record)
    try:
        while rest:
            rest = rest[file.write(rest) or 0 :]
    except BaseException:
        with contextlib.suppress(OSError):
            file.truncate(end)
        raise


class LineFile:
    """Text file of complete lines. Each line is passed to the operating system immediately.

    If the disk is full, up to 64 MiB of lines wait in memory and are written when there is space again. If the file is
    deleted, even with its folder, it is created again, with a warning. If the process is killed, the last line may be
    incomplete. `rewind_lines` removes it before the run resumes.
    """

    def __init__(self, path: Path, warn: Callable[[str], None], message: Callable[[str], None]):
        self._path = path
        self._warn, self._message = warn, message
        self._file: FileIO | None = None
        self._kept: deque[bytes] = deque()
        self._kept_bytes = 0
        self._num_lost = 0
        self._is_failing = False
        self._was_removed = False
        self._lock = threading.Lock()

    def append(self, lines: Iterable[str]) -> None:
        """Append lines, given without line feeds. Errors of the disk are warnings."""
        try:
            with self._lock:
                for line in lines:
                    self._keep(f"{line}\n".encode())
                self._write_kept()
        except OSError as error:
            if not self._is_failing:
                self._is_failing = True
                self._warn(f"{self._path.name} cannot be written, its lines are kept until it can be: {error}")
            return
        if self._is_failing:
            self._is_failing = False
            self._message(f"{self._path.name} can be written again")
        if self._was_removed:
            self._was_removed = False
            self._warn(f"{self._path} was removed; it begins anew, without the earlier lines")

    def flush_to_disk(self) -> bool:
        """Write the waiting lines and fsync. Return False on failure. Any thread may call it.

        Without this call, a checkpoint could survive a power failure that loses the metrics of its steps.
        """
        try:
            with self._lock:
                descriptor = os.dup(self._write_kept().fileno())
            try:
                # Outside of the lock, since a slow disk must not block the training loop, which appends.
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Write the waiting lines if possible, and close the file."""
        self.append(())
        with self._lock:
            self._release()
        if lost := self._num_lost + len(self._kept):
            self._warn(f"{self._path.name} lacks {lost} lines that could not be written")
        self._kept.clear()
        self._num_lost = self._kept_bytes = 0

    def _write_kept(self) -> FileIO:
        try:
            file = self._open()
            while self._kept:
                append_whole(file, self._kept[0])
                self._kept_bytes -= len(self._kept.popleft())
        except OSError:
            self._release()
            raise
        return file

    def _keep(self, line: bytes) -> None:
        self._kept.append(line)
        self._kept_bytes += len(line)
        while self._kept_bytes > _MOST_BYTES_KEPT and len(self._kept) > 1:
            self._kept_bytes -= len(self._kept.popleft())
            self._num_lost += 1

    def _open(self) -> FileIO:
        if self._file is not None and not _is_in_place(self._file, self._path):
            self._was_removed = True
            self._release()
        if self._file is None:
            if self._was_removed:
                # But not its parents: if they are missing too, the disk is probably not mounted.
                self._path.parent.mkdir(exist_ok=True)
            self._file = FileIO(self._path, "a")
        return self._file

    def _release(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None


def _is_in_place(file: FileIO, path: Path) -> bool:
    """Return False if the path of an open file was deleted or replaced, so that writes to the file would be lost."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def rewind_lines(path: Path, step: int) -> None:
    """Remove records after `step`, and an incomplete last line, from a file of JSON records in order of steps."""
    with path.open("r+b") as file:
        end = 0
        for line in file:
            if not line.endswith(b"\n") or _step_of(line) > step:
                break
            end += len(line)
        if end < file.seek(0, os.SEEK_END):
            file.truncate(end)
            os.fsync(file.fileno())


def _step_of(line: bytes) -> float:
    """Return the step of a record. Return minus infinity for a line without a step, so that the line is kept."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("-inf")
