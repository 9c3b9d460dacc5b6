# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""TensorBoard event files, written without torch or TensorFlow."""

import itertools
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from nemo_rl_moe.loggers.plain import to_plain

_file_numbers = itertools.count()


class TensorBoardLogger:
    """Writes scalars to `<run folder>/tensorboard/events.out.tfevents.*`, on disk before `log_step` returns.

    Scalars are float32, as TensorBoard's own; NaN and infinities are kept, and shown by TensorBoard as such.
    The events are written in the caller's thread: an error, such as a full disk, is raised where it can be caught,
    and nothing waits in a queue when the program dies.

    Args:
        run_folder: An existing folder.
    """

    name = "tensorboard"

    def __init__(self, run_folder: Path):
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event_type = event_pb2.Event
        self._summary_type = summary_pb2.Summary
        folder = run_folder / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        seconds = int(time.time())
        file_name = f"events.out.tfevents.{seconds:010d}.{socket.gethostname()}.{os.getpid()}.{next(_file_numbers)}"
        self._file = (folder / file_name).open("xb")
        self._writer = RecordWriter(self._file)
        self._write(self._event_type(wall_time=time.time(), file_version="brain.Event:2"))

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes one event that holds all metrics of the step."""
        value_type = self._summary_type.Value
        values = [value_type(tag=key, simple_value=float(value)) for key, value in metrics.items()]
        self._write(self._event_type(wall_time=time.time(), step=step, summary=self._summary_type(value=values)))

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Writes the configuration as YAML under the tag `config`, in TensorBoard's text view."""
        from tensorboard.plugins.text.summary_v2 import text_pb

        text = yaml.safe_dump(to_plain(config), sort_keys=False, allow_unicode=True)
        # Markdown shows a block indented by four spaces as it stands.
        block = "".join(f"    {line}\n" for line in text.splitlines())
        self._write(self._event_type(wall_time=time.time(), step=0, summary=text_pb("config", block)))

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _write(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())
        self._file.flush()
