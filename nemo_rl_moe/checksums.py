# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Checksums of a folder's files. They are computed while writing, stored in `files.json`, and compared before use.

Checksums detect bytes that a disk, a copy or a file system changed while sizes stay the same. Without them, weights
with a flipped exponent would load and train. They do not protect against an attacker, who can change files and
checksums.

A large file of tensors has one part for each tensor, so that a report names the damaged tensor, and the ranks of a job
share the comparison. XXH3 with 128 bits (Collet, xxHash 0.8) is as fast as a core can read memory.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from itertools import groupby
from pathlib import Path
from typing import IO, Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from xxhash import xxh3_128

from nemo_rl_moe.atomic_writes import write_whole

INVENTORY_FILE_NAME = "files.json"
HEADER = "header"
"""Name of a safetensors file's first part: names, shapes and offsets of its tensors."""
ACCEPTING = "if you have changed it on purpose: nemo-rl-moe verify --accept {folder}"
"""Hint in an error, for the case that the user changed a file on purpose."""
_BUFFER_BYTES = 2**20
"""Number of bytes of a thread's buffer, small enough to stay in the core's cache for the checksum."""
_MOST_THREADS = 4
"""Maximum number of threads that compare files. It is low, since other ranks use the cores too."""
_RUN_BYTES = 2**25
"""Approximate number of bytes that one thread compares at a time."""
_MOST_NAMED = 3
_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
_Size = Annotated[int, Field(ge=0)]


class InventoryError(Exception):
    """A folder's `files.json` is missing or damaged, or a file differs from its entry. The text names the file."""


class Part(NamedTuple):
    """Consecutive bytes of a file that hold one tensor: name of the tensor, number of bytes, and their XXH3 in
    hexadecimal."""

    name: str
    num_bytes: _Size
    checksum: _Digest


class FileEntry(BaseModel):
    """A file of a folder.

    Attributes:
        checksum: Checksum of the file. None if the file has parts, or another `files.json` lists its checksum.
        parts: Parts in order. Together they are the complete file. Empty if the file has one checksum.
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    num_bytes: _Size
    checksum: _Digest | None = None
    parts: list[Part] = []


class _Inventory(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    algorithm: Annotated[str, Field(pattern="^xxh3_128$")]
    files: dict[str, FileEntry]


_ADAPTER = TypeAdapter(_Inventory)
_SIZES = TypeAdapter(dict[str, _Size], config=ConfigDict(strict=True))
"""Type of an earlier form of `files.json`, which has sizes only."""


class ChecksumStream:
    """A binary file that is written in parts, each with a checksum. `parts` are the finished parts."""

    def __init__(self, stream: IO[bytes]):
        self._stream, self._hash, self._num_bytes = stream, xxh3_128(), 0
        self.parts: list[Part] = []

    def write(self, content: Any) -> int:
        view = memoryview(content).cast("B")
        self._hash.update(view)
        self._num_bytes += view.nbytes
        self._stream.write(view)
        return view.nbytes

    def end_part(self, name: str) -> None:
        self.parts.append(Part(name, self._num_bytes, self._hash.hexdigest()))
        self._hash, self._num_bytes = xxh3_128(), 0

    def tell(self) -> int:
        return self._stream.tell()

    def flush(self) -> None:
        self._stream.flush()

    def to_disk(self) -> None:
        """Flush and fsync the file, so that other machines see its content and a power failure does not lose it."""
        self._stream.flush()
        os.fsync(self._stream.fileno())

    def close(self) -> None:
        self._stream.close()


def checksum_of(*contents: Any) -> str:
    """Return the XXH3 of consecutive bytes or buffers, in hexadecimal."""
    found = xxh3_128()
    for content in contents:
        found.update(content)
    return found.hexdigest()


def add_to_inventory(folder: Path, name: str) -> None:
    """Add a small file, which was written after the others, to a folder's `files.json`, or replace its entry.

    Raises:
        OSError: The file cannot be read, or `files.json` cannot be written.
        InventoryError: `files.json` is missing or damaged.
    """
    num_bytes = (folder / name).stat().st_size
    entry = FileEntry(num_bytes=num_bytes, checksum=_checksum_of_file(folder / name, num_bytes))
    _write(folder, read_inventory(folder) | {name: entry})


def write_inventory(folder: Path, parts: Mapping[str, Sequence[Part]] | None = None) -> None:
    """Write `files.json` for all files in a folder and its subfolders.

    Files in subfolders with another `files.json` are listed with their sizes only.

    Args:
        parts: Name -> parts, for files that were written with a `ChecksumStream`. All other files are read.

    Raises:
        OSError: A file cannot be read, or `files.json` cannot be written.
    """
    entries = {}
    for name, num_bytes in _sizes(folder).items():
        if name == INVENTORY_FILE_NAME:
            continue
        if parts and name in parts:
            entries[name] = FileEntry(num_bytes=num_bytes, parts=list(parts[name]))
        elif _own_inventory(folder, name) is not None:
            entries[name] = FileEntry(num_bytes=num_bytes)
        else:
            entries[name] = FileEntry(num_bytes=num_bytes, checksum=_checksum_of_file(folder / name, num_bytes))
    _write(folder, entries)


def accept_files(folder: Path) -> None:
    """Write a new `files.json` for the files as they are now, without comparing them with the old one.

    A file of unchanged size is still listed in parts. So ranks can later divide the work of comparing this file, and a
    report can name the damaged tensor.

    Raises:
        OSError: A file cannot be read, or `files.json` cannot be written.
    """
    try:
        former = read_inventory(folder)
    except InventoryError:
        former = {}
    parts = {}
    for name, entry in former.items():
        path = folder / name
        if entry.parts and path.is_file() and path.stat().st_size == entry.num_bytes:
            parts[name] = _parts_as_they_are(path, entry)
    write_inventory(folder, parts)


def _parts_as_they_are(path: Path, entry: FileEntry) -> list[Part]:
    with path.open("rb", buffering=0) as file:
        buffer = memoryview(bytearray(_BUFFER_BYTES))
        return [
            piece.part._replace(checksum=_checksum(file, buffer, piece.start, piece.part.num_bytes))
            for piece in _pieces(entry)
        ]


def _write(folder: Path, entries: dict[str, FileEntry]) -> None:
    text = _Inventory(algorithm="xxh3_128", files=entries).model_dump_json(indent=1, exclude_defaults=True)
    # Put each part on one line.
    text = re.sub(r"\[\n\s+(\"[^\n]*\",)\n\s+(\d+,)\n\s+(\"[0-9a-f]{32}\")\n\s+\]", r"[\1 \2 \3]", text)
    write_whole(folder / INVENTORY_FILE_NAME, f"{text}\n")


def read_inventory(folder: Path) -> dict[str, FileEntry]:
    """Read a folder's `files.json`. Return name of a file -> its entry.

    Raises:
        InventoryError: `files.json` is missing or damaged.
    """
    path = folder / INVENTORY_FILE_NAME
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InventoryError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        return {name: FileEntry(num_bytes=size) for name, size in _SIZES.validate_json(content).items()}
    except ValidationError:
        pass
    try:
        entries = _ADAPTER.validate_json(content).files
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise InventoryError(f"{path}: damaged: {f'{place}: ' if place else ''}{first['msg']}") from None
    for name, entry in entries.items():
        if entry.parts and sum(part.num_bytes for part in entry.parts) != entry.num_bytes:
            raise InventoryError(f"{path}: damaged: the parts of {name} do not add up to {entry.num_bytes} bytes")
    return entries


def check_sizes(folder: Path) -> None:
    """Compare a folder's files with `files.json`: names, sizes, and checksums of files without parts.

    This detects a truncated copy. Files with parts, which are large, are compared by `find_damage`.

    Raises:
        InventoryError: `files.json` is missing or damaged, or a file is missing or differs. The text names the first
            such file.
    """
    entries = read_inventory(folder)
    present = _sizes(folder)
    for name, entry in entries.items():
        if name not in present:
            raise InventoryError(f"{folder / name}: is missing")
        if present[name] != entry.num_bytes:
            raise InventoryError(f"{folder / name}: got {present[name]} bytes, expected {entry.num_bytes}")
    for name, entry in entries.items():
        if entry.checksum is not None and (
            problem := _problem(folder / name, [_compared(folder / name, _pieces(entry))])
        ):
            raise InventoryError(problem)


def find_damage(
    folder: Path,
    *,
    share: int = 0,
    num_shares: int = 1,
    in_parts: bool | None = None,
) -> list[str]:
    """Return a line for each file that is missing or has changed. Empty without `files.json`.

    Subfolders with another `files.json` are skipped.

    Args:
        share: Index of the share of the bytes that this call compares, from 0, such as the rank in a job.
        num_shares: Number of shares into which the bytes are divided, such as the number of ranks.
        in_parts: True: compare only files with parts. False: only other files, which are small. None: all files.
    """
    if not (folder / INVENTORY_FILE_NAME).is_file():
        return []
    try:
        entries = read_inventory(folder)
    except InventoryError as error:
        return [str(error)]
    if in_parts is not None:
        entries = {name: entry for name, entry in entries.items() if bool(entry.parts) is in_parts}
    present = _sizes(folder)
    problems, work = [], []
    for name, entry in entries.items():
        if name not in present:
            problems.append(f"{folder / name}: is missing")
        elif present[name] != entry.num_bytes:
            problems.append(f"{folder / name}: damaged: {present[name]} bytes, expected {entry.num_bytes}")
        else:
            work.append((folder / name, list(_pieces(entry))))
    total = sum(piece.part.num_bytes for _, pieces in work for piece in pieces) or 1
    mine: list[tuple[Path, list[_Piece]]] = []
    before = 0
    for path, pieces in work:
        own = []
        for piece in pieces:
            if before * num_shares // total == share:
                own.append(piece)
            before += piece.part.num_bytes
        runs = groupby(own, lambda piece: piece.start // _RUN_BYTES)
        mine += [(path, list(run)) for _, run in runs]
    # Threads help, because reading and hashing release the GIL.
    with ThreadPoolExecutor(max(1, min(_MOST_THREADS, (os.cpu_count() or 1) // num_shares))) as threads:
        found = zip((path for path, _ in mine), threads.map(lambda item: _compared(*item), mine), strict=True)
        for path, of_runs in groupby(found, lambda item: item[0]):
            if problem := _problem(path, [outcome for _, outcome in of_runs]):
                problems.append(problem)
    return problems


@dataclass(frozen=True)
class _Piece:
    """A part of a file, or the entire file, with the position of its first byte."""

    start: int
    part: Part


def _pieces(entry: FileEntry) -> Iterator[_Piece]:
    if entry.checksum is not None:
        yield _Piece(0, Part("", entry.num_bytes, entry.checksum))
    start = 0
    for part in entry.parts:
        yield _Piece(start, part)
        start += part.num_bytes


def _compared(path: Path, pieces: Iterable[_Piece]) -> list[str] | OSError:
    """Return the names of the damaged pieces of a file, or the error if it cannot be read."""
    try:
        with path.open("rb", buffering=0) as file:
            buffer = memoryview(bytearray(min(_BUFFER_BYTES, max(1, os.fstat(file.fileno()).st_size))))
            return [
                piece.part.name
                for piece in pieces
                if _checksum(file, buffer, piece.start, piece.part.num_bytes) != piece.part.checksum
            ]
    except OSError as error:
        return error


def _problem(path: Path, outcomes: Sequence[list[str] | OSError]) -> str | None:
    """Return a line about a damaged or unreadable file, else None. `outcomes` has the results of `_compared`."""
    damaged: list[str] = []
    for outcome in outcomes:
        if isinstance(outcome, OSError):
            return f"{path}: cannot be read: {outcome.strerror}"
        damaged += outcome
    return damage_line(path, damaged) if damaged else None


def damage_line(path: Path, parts: Iterable[str]) -> str:
    """Return a line about a file with damaged parts. An empty name in `parts` means the entire file."""
    names = list(dict.fromkeys(filter(None, parts)))
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    where = f" in {', '.join(names[:_MOST_NAMED])}{more}" if names else ""
    return f"{path}: damaged{where}: not the bytes that were written, by the checksum in {INVENTORY_FILE_NAME}"


def _checksum_of_file(path: Path, num_bytes: int) -> str:
    with path.open("rb", buffering=0) as file:
        return _checksum(file, memoryview(bytearray(min(_BUFFER_BYTES, max(1, num_bytes)))), 0, num_bytes)


def _checksum(file: FileIO, buffer: memoryview, start: int, num_bytes: int) -> str:
    found = xxh3_128()
    file.seek(start)
    while num_bytes:
        count = file.readinto(buffer[: min(len(buffer), num_bytes)])
        if not count:
            break
        found.update(buffer[:count])
        num_bytes -= count
    return found.hexdigest()


def _sizes(folder: Path) -> dict[str, int]:
    sizes = {}
    for parent, folders, names in os.walk(folder):
        folders.sort()
        for path in (Path(parent) / name for name in sorted(names)):
            try:
                sizes[path.relative_to(folder).as_posix()] = path.stat().st_size
            except FileNotFoundError:  # the run is removing this checkpoint, or a link has no target
                continue
    return sizes


def _own_inventory(folder: Path, name: str) -> Path | None:
    """Return the subfolder whose `files.json` lists a file, or None if the `files.json` of `folder` lists it."""
    for parent in Path(name).parents:
        if parent != Path() and (folder / parent / INVENTORY_FILE_NAME).is_file():
            # A subfolder's `files.json` itself is listed by the folder above.
            return None if Path(name) == parent / INVENTORY_FILE_NAME else folder / parent
    return None
