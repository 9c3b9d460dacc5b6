# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Files of lines: appended whole, kept while the disk is full, and their plain values."""

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from io import FileIO
from pathlib import Path
from typing import Any


def to_plain(value: Any) -> Any:
    """The same content as dicts, lists, text, numbers, booleans and None; anything else becomes its text."""
    if isinstance(value, Enum):
        return to_plain(value.value)
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


_MOST_BYTES_KEPT = 64 * 2**20
_BLOCK_BYTES = 65536


def append_whole(file: FileIO, record: bytes) -> None:
    """Appends all of a record to an unbuffered file, or nothing.

    Raises:
        OSError: It could not be written; what was written of it is cut off again.
    """
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
    """A text file of lines that each stand in it whole, handed to the operating system at once.

    While the disk is full, lines are kept in memory, up to 64 MiB of them, and written when there is space again. A
    last line that a kill has cut off is removed before the first new one.

    Args:
        path: The file, created by the first call even where that brings no line.
        warn: Told once when writing fails, and when lines are lost.
        message: Told when writing works again.
    """

    def __init__(self, path: Path, warn: Callable[[str], None], message: Callable[[str], None]):
        self._path = path
        self._warn, self._message = warn, message
        self._file: FileIO | None = None
        self._kept: deque[bytes] = deque()
        self._kept_bytes = 0
        self._num_lost = 0
        self._is_failing = False
        self._lock = threading.Lock()

    def append(self, lines: Iterable[str]) -> None:
        """Adds lines, each without its line feed; never raises for a disk that does not take them."""
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

    def flush_to_disk(self) -> bool:
        """Tries to write what is kept, and waits until the disk has it; may be called from any thread.

        Returns:
            Whether all lines but those that were lost are on the disk.
        """
        try:
            with self._lock:
                descriptor = os.dup(self._write_kept().fileno())
            try:
                # Outside the lock: a slow disk must not hold up who appends.
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Tries once more to write what is kept, and closes the file."""
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
        if self._file is None:
            file = FileIO(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+")
            try:
                _cut_torn_line(file)
            except OSError:
                file.close()
                raise
            self._file = file
        return self._file

    def _release(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None


def _cut_torn_line(file: FileIO) -> None:
    """Shortens a file to its last line feed."""
    end = whole = file.seek(0, os.SEEK_END)
    while whole:
        start = max(0, whole - _BLOCK_BYTES)
        file.seek(start)
        found = file.read(whole - start).rfind(b"\n")
        if found >= 0:
            whole = start + found + 1
            break
        whole = start
    if whole < end:
        file.truncate(whole)
