# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads back what the loggers wrote: every function returns metric key -> [(step, value), ...], steps ascending."""

import importlib
import json
import struct
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nemo_rl_moe.errors import DataError
from nemo_rl_moe.loggers.jsonl import read_metrics

MetricHistory = dict[str, list[tuple[int, float]]]

# The layout of a W&B run file: a header, then blocks of 32 KiB with length-prefixed records.
_WANDB_HEADER = b":W&B\xe1\xbe\x00"
_WANDB_BLOCK_BYTES = 32768
_WANDB_RECORD_HEADER = struct.Struct("<IHB")
# What a record holds: all of an entry, or (with 3 between them) its first or its last part.
_FULL, _FIRST, _LAST = 1, 2, 4


def read_jsonl(path: Path) -> MetricHistory:
    """Reads a `metrics.jsonl`.

    Raises:
        DataError: A whole line is not a step record.
    """
    history: MetricHistory = {}
    for record in read_metrics(path):
        for key, value in record.metrics.items():
            history.setdefault(key, []).append((record.step, value))
    return _sorted(history)


def read_tensorboard(folder: Path) -> MetricHistory:
    """Reads the scalars of all event files in a folder; values are float32."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # 0 asks for every scalar; the default keeps a random 10,000 a key.
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    keys = accumulator.Tags()["scalars"]
    return _sorted({key: [(event.step, event.value) for event in accumulator.Scalars(key)] for key in keys})


def read_wandb_offline(folder: Path) -> MetricHistory:
    """Reads the history of the one W&B run below a folder, such as `<run folder>/wandb`.

    W&B's own columns, which begin with an underscore, and values that are not numbers are left out.

    Raises:
        DataError: There is not exactly one `.wandb` file, or it is damaged before its end.
    """
    messages: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    files = sorted({path.resolve() for path in folder.rglob("run-*.wandb")})
    if len(files) != 1:
        raise DataError(f"{folder}: expected one run-*.wandb file, found {len(files)}")
    history: MetricHistory = {}
    for data in _wandb_records(files[0]):
        record = messages.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") != "history":
            continue
        row = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for key, value in row.items():
            if not key.startswith("_") and isinstance(value, int | float):
                history.setdefault(key, []).append((int(row["_step"]), float(value)))
    return _sorted(history)


def read_mlflow(tracking_uri: str, experiment_name: str, run_name: str | None = None) -> MetricHistory:
    """Reads the newest run of an MLflow experiment, or the newest one that has a certain name.

    Raises:
        DataError: There is no such experiment or run.
    """
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri)
    experiment = client.get_experiment_by_name(experiment_name)
    runs = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time DESC"]) if experiment else []
    run = next((run for run in runs if run_name is None or run.info.run_name == run_name), None)
    if run is None:
        raise DataError(f"{tracking_uri}: no run {run_name or ''} in the experiment {experiment_name!r}")
    history = {key: client.get_metric_history(run.info.run_id, key) for key in run.data.metrics}
    return _sorted({key: [(entry.step, _unclamped(entry.value)) for entry in history[key]] for key in history})


def _unclamped(value: float) -> float:
    """A local MLflow store writes an infinity as the largest float64."""
    return value * float("inf") if abs(value) == sys.float_info.max else value


def _sorted(history: MetricHistory) -> MetricHistory:
    return {key: sorted(points, key=lambda point: point[0]) for key, points in sorted(history.items())}


def _wandb_records(path: Path) -> Iterator[bytes]:
    """The records of a W&B run file, put together again where a block's end cut them; a cut last one is left out."""
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
