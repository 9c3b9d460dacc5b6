# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Reader of the `.wandb` files of offline runs, to find the steps of a killed run. W&B's package has no such reader."""

import importlib
import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nemo_rl_moe.errors import DataError

# A W&B run file has a header, then blocks of 32 KiB with length-prefixed records.
_WANDB_HEADER = b":W&B\xe1\xbe\x00"
_WANDB_BLOCK_BYTES = 32768
_WANDB_RECORD_HEADER = struct.Struct("<IHB")
# Kinds of records: a full entry, its first part, and its last part (3: a middle part).
_FULL, _FIRST, _LAST = 1, 2, 4


def wandb_files(folder: Path, run_id: str = "*") -> list[Path]:
    """Return the run files below a folder. The file of the oldest attempt is first."""
    files = {path.resolve() for path in folder.rglob(f"run-{run_id}.wandb")}
    # W&B names the folder of a file `run-<time>-<id>` or `offline-run-<time>-<id>`.
    return sorted(files, key=lambda path: (path.parent.name.removeprefix("offline-"), path))


def wandb_history(path: Path) -> Iterator[tuple[int, dict[tuple[str, ...], Any]]]:
    """Yield (step, row) of the history in a run file. A row maps the parts of a nested key to a value."""
    for history in wandb_records(path, "history"):
        row = {tuple(item.nested_key) or (item.key,): json.loads(item.value_json) for item in history.item}
        yield int(row["_step",]), row


def last_wandb_step(folder: Path, run_id: str) -> int:
    """Return the last step in the newest run file that has steps, or -1.

    A damaged file is read up to the damage. W&B cannot read the rest either.
    """
    for path in reversed(wandb_files(folder, run_id)):
        last = -1
        try:
            for step, _ in wandb_history(path):
                last = max(last, step)
        except DataError:
            pass
        if last >= 0:
            return last
    return -1


def wandb_records(path: Path, kind: str) -> Iterator[Any]:
    """Yield the records of one kind in a run file, such as `history`, `metric` or `alert`."""
    messages: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    for data in _wandb_records(path):
        record = messages.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == kind:
            yield getattr(record, kind)


def _wandb_records(path: Path) -> Iterator[bytes]:
    """Yield the records of a W&B run file. A record may span blocks. An incomplete last record is skipped."""
    content = path.read_bytes()
    if not content.startswith(_WANDB_HEADER):
        raise DataError(f"{path}: not a W&B run file of a known version")
    position = len(_WANDB_HEADER)
    parts: list[bytes] = []
    while position + _WANDB_RECORD_HEADER.size <= len(content):
        left_in_block = _WANDB_BLOCK_BYTES - position % _WANDB_BLOCK_BYTES
        if left_in_block < _WANDB_RECORD_HEADER.size:
            position += left_in_block
            continue
        checksum, length, kind = _WANDB_RECORD_HEADER.unpack_from(content, position)
        start = position + _WANDB_RECORD_HEADER.size
        data = content[start : start + length]
        if len(data) < length:
            return
        if zlib.crc32(bytes([kind]) + data) != checksum:
            raise DataError(f"{path}: damaged at byte {position}")
        position = start + length
        parts = [data] if kind in (_FULL, _FIRST) else [*parts, data]
        if kind in (_FULL, _LAST):
            yield b"".join(parts)
