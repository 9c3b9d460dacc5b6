# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Capture folders: routed experts, log-probabilities and rewards of the sequences of an RL run, by any trainer.

A folder holds `capture.json` with the layers and the number of experts, and Parquet files of one step each,
`step-00000012.{writer}-{number}.parquet`, with one row per sequence. Files have unique names and are complete when they
appear. Therefore ranks can write at once without coordination, and a reader can follow.

Every column is optional except the length of a sequence. Columns on the token axis have one value per token, in the
order of the sequence; further axes (layers, experts) are flattened after it.
"""

import json
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nemo_rl_moe.errors import DataError, one_line
from nemo_rl_moe.runs.folder.captured_sequences import (
    TOKEN_TYPES,
    UNKNOWN,
    CaptureDescription,
    CapturedRows,
    CapturedSequence,
    checked_column,
)
from nemo_rl_moe.shapes import Float

FORMAT, VERSION = "routing-capture", 1
DESCRIPTION_FILE = "capture.json"
_OLD_FORMAT, _OLD_DESCRIPTION_FILE = "routing-tape", "tape.json"  # older name
CAPTURE_FOLDER = "capture"
"""Folder of captured routes in a run's folder."""
CAPTURE_FOLDERS = (CAPTURE_FOLDER, "tape")  # older name last
_TOKEN_TYPES: Mapping[str, pa.DataType] = {name: pa.from_numpy_dtype(kind) for name, kind in TOKEN_TYPES.items()}
EXPERT_BIAS = "expert_bias"
"""Column with the bias of all routers, flattened. Only one row of a file has it, since it belongs to the step."""
EXPERT_BIAS_BEFORE = "expert_bias_before"
"""Column with the bias before the last optimizer step that was not skipped."""
SCHEMA = pa.schema(
    [("sequence", pa.string()), ("num_tokens", pa.int32()), ("reward", pa.float32())]
    + [(name, pa.list_(kind)) for name, kind in _TOKEN_TYPES.items()]
    + [(name, pa.list_(pa.float32())) for name in (EXPERT_BIAS, EXPERT_BIAS_BEFORE)]
)
_FILE_NAME = re.compile(r"step-(\d{8,})\.(.+?)(?:-\d+)?\.parquet")
_WRITER = re.compile(r"[A-Za-z0-9-]+")
_ROWS_AT_A_TIME = 64
_UNREADABLE = (OSError, ValueError, KeyError, pa.ArrowException)


class CaptureFolderWriter:
    """Writer of a process into a capture folder. Several processes may write into one folder at the same time.

    Args:
        name: Name of this writer in findings, such as "rank-3": letters, digits and dashes. Random by default.
    """

    def __init__(self, folder: Path, description: CaptureDescription, name: str | None = None):
        if name is not None and not _WRITER.fullmatch(name):
            raise ValueError(f"a writer of a capture is named {name!r}, expected letters, digits and dashes")
        self._folder, self._description = folder, description
        self._writer, self._number = name or uuid.uuid4().hex[:12], 0
        folder.mkdir(parents=True, exist_ok=True)
        if described_by(folder).exists():
            found = read_description(folder)
            if (found.layers, found.num_experts, found.topk) != (
                description.layers,
                description.num_experts,
                description.topk,
            ):
                raise DataError([f"{folder}: holds a capture of another model: {found}, not {description}"])
            return
        text = json.dumps(
            {
                "format": FORMAT,
                "version": VERSION,
                "layers": list(description.layers),
                "num_experts": description.num_experts,
                "topk": description.topk,
                "made_by": description.made_by,
                "exact": description.is_exact,
                "bitwise": description.is_bitwise,
                "bias_is_updated": description.bias_is_updated,
                "indexer_shape": list(description.indexer_shape),
            },
            indent=1,
        )
        staging = folder / f".{DESCRIPTION_FILE}.{uuid.uuid4().hex[:12]}"
        staging.write_text(f"{text}\n")
        staging.replace(folder / DESCRIPTION_FILE)

    def write(
        self,
        step: int,
        sequences: Sequence[CapturedSequence],
        expert_bias: Float[np.ndarray, "layers experts"] | None = None,
        expert_bias_before: Float[np.ndarray, "layers experts"] | None = None,
    ) -> Path:
        """Write sequences of one step to a new file, and return its path.

        Args:
            expert_bias: Bias of the training routers at this step. It is enough if one of the step's files has it.
            expert_bias_before: The bias before the last optimizer step that was not skipped. Such an optimizer step
                changes the bias of all layers.
        """
        records: dict[str, list[Any]] = {name: [] for name in SCHEMA.names}
        for sequence in sequences:
            records["sequence"].append(sequence.name)
            records["num_tokens"].append(sequence.num_tokens)
            records["reward"].append(sequence.reward)
            if unknown := set(sequence.columns) - set(_TOKEN_TYPES):
                raise ValueError(f"{sequence.name}: a capture has no column {sorted(unknown)[0]!r}")
            for name in _TOKEN_TYPES:
                values = checked_column(self._description, sequence, name)
                records[name].append(None if values is None else values.reshape(-1))
        shape = (len(self._description.layers), self._description.num_experts)
        for name, bias in ((EXPERT_BIAS, expert_bias), (EXPERT_BIAS_BEFORE, expert_bias_before)):
            if bias is not None and bias.shape != shape:
                raise ValueError(f"{name} has the shape {bias.shape}, expected {shape}")
            flat = None if bias is None else bias.astype(np.float32).reshape(-1)
            records[name] = [flat if number == 0 else None for number in range(len(sequences))]
        staging = self._folder / f".step-{step:08d}.{uuid.uuid4().hex[:12]}"
        pq.write_table(pa.table(records, schema=SCHEMA), staging, compression="zstd", row_group_size=_ROWS_AT_A_TIME)
        while True:
            path = self._folder / f"step-{step:08d}.{self._writer}-{self._number}.parquet"
            self._number += 1
            if _moved(staging, path):
                return path


def _moved(staging: Path, path: Path) -> bool:
    """Move a file to its final name. Return False if the name is taken, by another writer or from before a resume."""
    if path.exists():
        return False
    try:
        path.hardlink_to(staging)  # only one of two processes succeeds, unlike with a replacement
    except FileExistsError:
        return False
    except OSError:  # a file system without links
        staging.replace(path)
        return True
    staging.unlink()
    return True


def read_description(folder: Path) -> CaptureDescription:
    """Return the description in a capture folder."""
    path = described_by(folder)
    try:
        found = json.loads(path.read_text())
        if found["format"] not in (FORMAT, _OLD_FORMAT):
            raise ValueError(f"format {found['format']!r}, expected {FORMAT!r}")
        if found["version"] > VERSION:
            raise ValueError(f"version {found['version']}, and this program knows up to {VERSION}")
        layers = tuple(int(layer) for layer in found["layers"])
        indexer = found.get("indexer_shape", (0, 0))
        return CaptureDescription(
            layers,
            int(found["num_experts"]),
            int(found["topk"]),
            str(found.get("made_by", "")),
            found.get("exact") is True,
            found.get("bitwise") is True,
            None if found.get("bias_is_updated") is None else found["bias_is_updated"] is True,
            (int(indexer[0]), int(indexer[1])),
        )
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise DataError([f"{path}: no description of a capture: {one_line(error)}"]) from error


def described_by(folder: Path) -> Path:
    """Return the path of a folder's description file, under its older name if only a file with that name exists."""
    old = folder / _OLD_DESCRIPTION_FILE
    return old if old.is_file() and not (folder / DESCRIPTION_FILE).exists() else folder / DESCRIPTION_FILE


def existing_capture(run_folder: Path) -> Path | None:
    """Return the capture folder of a run, under either name. None if the run has no capture."""
    folders = (run_folder / name for name in CAPTURE_FOLDERS)
    return next((folder for folder in folders if described_by(folder).is_file()), None)


def steps_of(folder: Path) -> dict[int, list[Path]]:
    """Return step -> its files, in ascending order of steps."""
    found = [(int(match.group(1)), path) for path in folder.iterdir() if (match := _FILE_NAME.fullmatch(path.name))]
    return {step: [path for _, path in pairs] for step, pairs in groupby(sorted(found), key=lambda pair: pair[0])}


def rewind_capture(folder: Path, step: int) -> None:
    """Remove the files of all steps after `step`, if the folder exists."""
    for found, paths in (steps_of(folder) if folder.is_dir() else {}).items():
        for path in paths if found > step else ():
            path.unlink()


def writers_of(folder: Path) -> list[str]:
    """Return the sorted names of the writers (such as ranks) of a folder's files."""
    return sorted({match[2] for path in folder.iterdir() if (match := _FILE_NAME.fullmatch(path.name))})


def read_step(description: CaptureDescription, step: int, files: Sequence[Path]) -> Iterator[CapturedRows]:
    """Yield the sequences of one step, a few at a time."""
    for path in files:
        match = _FILE_NAME.fullmatch(path.name)
        writer = match[2] if match else ""
        try:
            with pq.ParquetFile(path) as file:
                for batch in file.iter_batches(batch_size=_ROWS_AT_A_TIME):
                    if len(batch):
                        yield _rows(description, step, batch, writer)
        except _UNREADABLE as error:
            raise DataError([f"{path}: cannot be read as sequences of a capture: {one_line(error)}"]) from error


def _rows(description: CaptureDescription, step: int, batch: pa.RecordBatch, writer: str) -> CapturedRows:
    lengths = batch.column("num_tokens").to_numpy(zero_copy_only=False).astype(np.int64)
    if lengths.min() < 1:
        raise ValueError(f"num_tokens of a sequence is {lengths.min()}, expected at least 1")
    columns = {}
    for name, kind in _TOKEN_TYPES.items():
        if name not in batch.schema.names:
            continue
        values = batch.column(name)
        is_partial = name == "rollout_experts" and 0 < values.null_count < len(batch)
        if values.null_count and not is_partial:
            continue
        if not pa.types.is_list(values.type) or values.type.value_type != kind:
            raise ValueError(f"{name} is {values.type}, expected {pa.list_(kind)}")
        row = description.row_sizes.get(name, ())
        found = values.flatten().to_numpy(zero_copy_only=False)
        sizes = np.diff(values.offsets.to_numpy())
        width = int(np.prod(row, dtype=np.int64))
        if is_partial:  # a part of the rollout lost its routes: the column is kept, so that the audit finds the gap
            has = np.repeat(~values.is_null().to_numpy(zero_copy_only=False), lengths * width)
            filled = np.full(len(has), UNKNOWN, dtype=found.dtype)
            if np.count_nonzero(has) == len(found):
                filled[has] = found
                found, sizes = filled, lengths * width
        if not np.array_equal(sizes, lengths * width):
            first = int(np.flatnonzero(sizes != lengths * width)[0])
            raise ValueError(f"{name} of sequence {first} has {sizes[first]} values, expected {lengths[first] * width}")
        columns[name] = found.reshape(-1, *row)
    names = batch.column("sequence").to_pylist() if "sequence" in batch.schema.names else [None] * len(batch)
    rewards = batch.column("reward") if "reward" in batch.schema.names else None
    return CapturedRows(
        step,
        tuple(str(number) if name is None else name for number, name in enumerate(names)),
        lengths,
        columns,
        None if rewards is None or rewards.null_count else rewards.to_numpy(zero_copy_only=False),
        writer,
        _bias(description, batch, EXPERT_BIAS),
        _bias(description, batch, EXPERT_BIAS_BEFORE),
    )


def _bias(
    description: CaptureDescription, batch: pa.RecordBatch, name: str
) -> Float[np.ndarray, "layers experts"] | None:
    if name not in batch.schema.names:
        return None
    shape = (len(description.layers), description.num_experts)
    for values in batch.column(name):
        if values.is_valid:
            found = np.array(values.as_py(), dtype=np.float32)
            if found.size != shape[0] * shape[1]:
                raise ValueError(f"{name} has {found.size} values, expected {shape[0] * shape[1]}")
            return found.reshape(shape)
    return None
