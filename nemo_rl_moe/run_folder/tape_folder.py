# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Tape folders: routed experts, log-probabilities and rewards of the sequences of an RL run, whoever trained it.

A folder holds `tape.json`, which says what a row of experts looks like, and Parquet files of one step each,
`step-00000012.{writer}-{number}.parquet`, a row for each sequence. Every file appears whole, under a name of its own:
many ranks write at once without a word between them, and a reader may follow while they do.

Everything but the length of a sequence may be absent. On the token axis values stand in the order of the sequence, one
for each token; what is of a layer or an expert besides is flattened behind it.
"""

import json
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Shaped

from nemo_rl_moe.errors import DataError, one_line

FORMAT, VERSION = "routing-tape", 1
DESCRIPTION_FILE = "tape.json"
TAPE_FOLDER = "tape"
"""Of a run's folder."""
UNKNOWN = -1

EXPERTS = ("rollout_experts", "training_experts", "repeated_experts")
"""`[tokens, layers, topk]` int16, -1 where unknown: of the rollout, of training, and of training once more with another
composition of its batches."""
LOGPROBS = ("rollout_logprobs", "training_logprobs", "replayed_logprobs", "repeated_logprobs")
"""Of each token given those before it, nats: by the engine that drew it; by the trainer with the experts of its own
routers, with those of the rollout, and once more with another composition of its batches."""
_TOKEN_TYPES: Mapping[str, pa.DataType] = {
    "token_ids": pa.int32(),
    "loss_mask": pa.bool_(),
    **dict.fromkeys(EXPERTS, pa.int16()),
    **dict.fromkeys(LOGPROBS, pa.float32()),
    "weight_versions": pa.int32(),
    "advantages": pa.float32(),
    "margins": pa.float32(),
}
"""Columns on the token axis. `margins`, `[tokens, layers]`: score of the last expert that a router of training chose
less that of the first one that it left out."""
# By hand: releases of pyarrow before 26 ask pandas, which need not be there.
_NUMPY_TYPES: Mapping[pa.DataType, type[np.generic]] = {
    pa.bool_(): np.bool_,
    pa.int16(): np.int16,
    pa.int32(): np.int32,
    pa.float32(): np.float32,
}
SCHEMA = pa.schema(
    [("sequence", pa.string()), ("num_tokens", pa.int32()), ("reward", pa.float32())]
    + [(name, pa.list_(kind)) for name, kind in _TOKEN_TYPES.items()]
)
_FILE_NAME = re.compile(r"step-(\d{8,})\.(.+?)(?:-\d+)?\.parquet")
_WRITER = re.compile(r"[A-Za-z0-9-]+")
_ROWS_AT_A_TIME = 64
_UNREADABLE = (OSError, ValueError, KeyError, pa.ArrowException)


@dataclass(frozen=True)
class TapeDescription:
    """Meaning of the numbers of a folder.

    Attributes:
        layers: Indices of the MoE layers in the whole model, ascending.
        num_experts: Routed experts of a layer.
        topk: Experts of each token.
        made_by: Who wrote it, for the eye.
        is_exact: Rollout and training had the same weights and computed in float32: their routes differ by near ties
            alone.
    """

    layers: tuple[int, ...]
    num_experts: int
    topk: int
    made_by: str = ""
    is_exact: bool = False

    @property
    def row_sizes(self) -> Mapping[str, tuple[int, ...]]:
        """Axes behind the token's, of columns that have any."""
        experts = dict.fromkeys(EXPERTS, (len(self.layers), self.topk))
        return {**experts, "margins": (len(self.layers),)}


@dataclass(frozen=True)
class TapeSequence:
    """One sequence as it is written.

    Attributes:
        name: Where it came from.
        num_tokens: Its length.
        columns: Of those on the token axis; experts may end with the token before the last, which no engine feeds.
        reward: What it is worth.
    """

    name: str
    num_tokens: int
    columns: Mapping[str, Shaped[np.ndarray, "tokens ..."]]
    reward: float | None = None


@dataclass(frozen=True)
class TapeRows:
    """Some sequences of one step, one behind the other.

    Attributes:
        step: Of the run.
        names: Of each sequence.
        lengths: Tokens of each.
        columns: Of all tokens, `[tokens, ...]`; only those that all of these sequences have.
        rewards: Of each sequence; None where any has none.
        writer: Who wrote them, such as one rank of several; empty where nobody says.
    """

    step: int
    names: tuple[str, ...]
    lengths: Shaped[np.ndarray, " sequences"]
    columns: Mapping[str, Shaped[np.ndarray, "tokens ..."]]
    rewards: Shaped[np.ndarray, " sequences"] | None
    writer: str = ""


class TapeWriter:
    """Writer of one process; others write into the same folder at the same time.

    Args:
        folder: The folder; is made where it is missing.
        description: The same of all writers.
        name: Of this writer, such as "rank-3": letters, digits and dashes; findings name it. None: one by chance.

    Raises:
        DataError: The folder holds a tape of another model.
        ValueError: The name has other characters.
    """

    def __init__(self, folder: Path, description: TapeDescription, name: str | None = None):
        if name is not None and not _WRITER.fullmatch(name):
            raise ValueError(f"a writer of a tape is named {name!r}, expected letters, digits and dashes")
        self._folder, self._description = folder, description
        self._writer, self._number = name or uuid.uuid4().hex[:12], 0
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / DESCRIPTION_FILE).exists():
            found = read_description(folder)
            if (found.layers, found.num_experts, found.topk) != (
                description.layers,
                description.num_experts,
                description.topk,
            ):
                raise DataError([f"{folder}: holds a tape of another model: {found}, not {description}"])
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
            },
            indent=1,
        )
        staging = folder / f".{DESCRIPTION_FILE}.{uuid.uuid4().hex[:12]}"
        staging.write_text(f"{text}\n")
        staging.replace(folder / DESCRIPTION_FILE)

    def write(self, step: int, sequences: Sequence[TapeSequence]) -> Path:
        """Adds sequences of one step, as a file.

        Raises:
            ValueError: A column is none of the format's, or has another shape than the description says.
        """
        records: dict[str, list[Any]] = {name: [] for name in SCHEMA.names}
        for sequence in sequences:
            records["sequence"].append(sequence.name)
            records["num_tokens"].append(sequence.num_tokens)
            records["reward"].append(sequence.reward)
            if unknown := set(sequence.columns) - set(_TOKEN_TYPES):
                raise ValueError(f"{sequence.name}: a tape has no column {sorted(unknown)[0]!r}")
            for name in _TOKEN_TYPES:
                values = _checked(self._description, sequence, name)
                records[name].append(None if values is None else values.reshape(-1))
        staging = self._folder / f".step-{step:08d}.{uuid.uuid4().hex[:12]}"
        pq.write_table(pa.table(records, schema=SCHEMA), staging, compression="zstd", row_group_size=_ROWS_AT_A_TIME)
        while True:
            path = self._folder / f"step-{step:08d}.{self._writer}-{self._number}.parquet"
            self._number += 1
            if _moved(staging, path):
                return path


def _moved(staging: Path, path: Path) -> bool:
    """True once a file has its name; False where that name is taken: by a run that was resumed, or another writer."""
    if path.exists():
        return False
    try:
        path.hardlink_to(staging)  # which two cannot do, unlike a replacement
    except FileExistsError:
        return False
    except OSError:  # a file system without links
        staging.replace(path)
        return True
    staging.unlink()
    return True


def _checked(
    description: TapeDescription, sequence: TapeSequence, name: str
) -> Shaped[np.ndarray, "tokens ..."] | None:
    """A column as a tape has it: with a row for the last token too; None where the sequence has none."""
    if name not in sequence.columns:
        return None
    values = np.asarray(sequence.columns[name])
    row = description.row_sizes.get(name, ())
    expected = (sequence.num_tokens, *row)
    if name in EXPERTS and values.shape == (sequence.num_tokens - 1, *row):
        values = np.concatenate([values, np.full((1, *row), UNKNOWN, dtype=values.dtype)])
    if values.shape != expected:
        raise ValueError(f"{sequence.name}: {name} has the shape {values.shape}, expected {expected}")
    return values


def rows_of(description: TapeDescription, step: int, sequences: Sequence[TapeSequence]) -> TapeRows:
    """Sequences that are in memory as a reader of a folder gives them.

    Args:
        description: Meaning of their numbers.
        step: Of the run.
        sequences: At least one.

    Raises:
        ValueError: A column has another shape than the description says.
    """
    columns = {}
    for name, kind in _TOKEN_TYPES.items():
        values = [_checked(description, sequence, name) for sequence in sequences]
        if all(part is not None for part in values):
            columns[name] = np.concatenate([part for part in values if part is not None]).astype(_NUMPY_TYPES[kind])
    rewards = [sequence.reward for sequence in sequences if sequence.reward is not None]
    return TapeRows(
        step,
        tuple(sequence.name for sequence in sequences),
        np.array([sequence.num_tokens for sequence in sequences], dtype=np.int64),
        columns,
        np.array(rewards, dtype=np.float32) if len(rewards) == len(sequences) else None,
    )


def read_description(folder: Path) -> TapeDescription:
    """Description of the numbers of a folder.

    Raises:
        DataError: It is no tape folder, or one of a later version.
    """
    path = folder / DESCRIPTION_FILE
    try:
        found = json.loads(path.read_text())
        if found["format"] != FORMAT:
            raise ValueError(f"format {found['format']!r}, expected {FORMAT!r}")
        if found["version"] > VERSION:
            raise ValueError(f"version {found['version']}, and this program knows up to {VERSION}")
        layers = tuple(int(layer) for layer in found["layers"])
        return TapeDescription(
            layers,
            int(found["num_experts"]),
            int(found["topk"]),
            str(found.get("made_by", "")),
            found.get("exact") is True,
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError([f"{path}: no description of a tape: {one_line(error)}"]) from error


def steps_of(folder: Path) -> dict[int, list[Path]]:
    """The files of each step, in the order of the steps."""
    found = [(int(match.group(1)), path) for path in folder.iterdir() if (match := _FILE_NAME.fullmatch(path.name))]
    return {step: [path for _, path in pairs] for step, pairs in groupby(sorted(found), key=lambda pair: pair[0])}


def rewind_tape(folder: Path, step: int) -> None:
    """Removes the files of later steps, where there is such a folder."""
    for found, paths in (steps_of(folder) if folder.is_dir() else {}).items():
        for path in paths if found > step else ():
            path.unlink()


def writers_of(folder: Path) -> list[str]:
    """Names of those who wrote a folder, in order."""
    return sorted({match[2] for path in folder.iterdir() if (match := _FILE_NAME.fullmatch(path.name))})


def read_step(description: TapeDescription, step: int, files: Sequence[Path]) -> Iterator[TapeRows]:
    """The sequences of one step, a few at a time.

    Raises:
        DataError: A file cannot be read, or holds something else than its folder's description says.
    """
    for path in files:
        try:
            with pq.ParquetFile(path) as file:
                for batch in file.iter_batches(batch_size=_ROWS_AT_A_TIME):
                    if len(batch):
                        yield _rows(description, step, batch, _writer_of(path))
        except _UNREADABLE as error:
            raise DataError([f"{path}: cannot be read as sequences of a tape: {one_line(error)}"]) from error


def _writer_of(path: Path) -> str:
    match = _FILE_NAME.fullmatch(path.name)
    return match[2] if match else ""


def _rows(description: TapeDescription, step: int, batch: pa.RecordBatch, writer: str) -> TapeRows:
    lengths = batch.column("num_tokens").to_numpy(zero_copy_only=False).astype(np.int64)
    if lengths.min() < 1:
        raise ValueError(f"num_tokens of a sequence is {lengths.min()}, expected at least 1")
    columns = {}
    for name, kind in _TOKEN_TYPES.items():
        if name not in batch.schema.names or batch.column(name).null_count:
            continue
        values = batch.column(name)
        if not pa.types.is_list(values.type) or values.type.value_type != kind:
            raise ValueError(f"{name} is {values.type}, expected {pa.list_(kind)}")
        row = description.row_sizes.get(name, ())
        found = values.flatten().to_numpy(zero_copy_only=False)
        sizes = np.diff(values.offsets.to_numpy())
        width = int(np.prod(row, dtype=np.int64))
        if not np.array_equal(sizes, lengths * width):
            first = int(np.flatnonzero(sizes != lengths * width)[0])
            raise ValueError(f"{name} of sequence {first} has {sizes[first]} values, expected {lengths[first] * width}")
        columns[name] = found.reshape(-1, *row)
    names = batch.column("sequence").to_pylist() if "sequence" in batch.schema.names else [None] * len(batch)
    rewards = batch.column("reward") if "reward" in batch.schema.names else None
    return TapeRows(
        step,
        tuple(str(number) if name is None else name for number, name in enumerate(names)),
        lengths,
        columns,
        None if rewards is None or rewards.null_count else rewards.to_numpy(zero_copy_only=False),
        writer,
    )
