# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""TensorBoard event files, written without torch or TensorFlow."""

import socket
import time
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import yaml

from nemo_rl_moe.runs.folder.lines import append_whole, to_plain
from nemo_rl_moe.runs.folder.metrics import RunOutcome
from nemo_rl_moe.runs.folder.sample_text import ShownSample, samples_text
from nemo_rl_moe.runs.loggers.interface import LoggerBase


class TensorBoardLogger(LoggerBase):
    """Writer of `<run folder>/tensorboard/events.out.tfevents.*`. Each step is written before `log_step` returns.

    Scalars are float32. TensorBoard also shows NaN and infinity. On a full disk, writing an event raises an error and
    leaves no partial record.

    A resumed run gets a new file. Its first event makes TensorBoard forget the steps after `resumed_after`.
    """

    name = "tensorboard"

    def __init__(self, run_folder: Path, resumed_after: int | None = None):
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event_type = event_pb2.Event
        self._summary_type = summary_pb2.Summary
        folder = run_folder / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        self.last_step = -1 if resumed_after is None else min(resumed_after, _last_step(folder))
        self._config_step = resumed_after or 0
        # Files are read in the order of their names, so the times in the names must ascend even if the clock does not.
        seconds = max([int(time.time()), *(1 + second for second in _seconds_in_names(folder))])
        file_name = f"events.out.tfevents.{seconds:010d}.{socket.gethostname()}"
        self._record = BytesIO()
        self._writer = RecordWriter(self._record)
        self._file = (folder / file_name).open("xb", buffering=0)
        self._write(self._event_type(wall_time=time.time(), file_version="brain.Event:2"))
        if resumed_after is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(self._event_type(wall_time=time.time(), step=resumed_after + 1, session_log=start))

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [self._summary_type.Value(tag=key, simple_value=float(value)) for key, value in metrics.items()]
        self._write(self._event_type(wall_time=time.time(), step=step, summary=self._summary_type(value=values)))

    def log_plots(self, step: int, plots: Mapping[str, bytes]) -> None:
        """Write the plots of the step as one event, for TensorBoard's image view."""
        import PIL.Image

        summary = self._summary_type()
        for key, content in plots.items():
            plot = PIL.Image.open(BytesIO(content))
            image = self._summary_type.Image(
                encoded_image_string=content, width=plot.width, height=plot.height, colorspace=len(plot.getbands())
            )
            summary.value.add(tag=key, image=image)
        self._write(self._event_type(wall_time=time.time(), step=step, summary=summary))

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Write the configuration as YAML under the tag `config`, in TensorBoard's text view."""
        text = yaml.safe_dump(to_plain(config), sort_keys=False, allow_unicode=True)
        self._write_text(self._config_step, "config", text)

    def log_samples(self, step: int, split: str, samples: Sequence[ShownSample]) -> None:
        """Write samples under the tags `samples/train` and `samples/val`, in TensorBoard's text view."""
        self._write_text(step, f"samples/{split}", samples_text(samples))

    def _write_text(self, step: int, tag: str, text: str) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb

        # Markdown shows a block indented by four spaces verbatim.
        block = "".join(f"    {line}\n" for line in text.splitlines())
        self._write(self._event_type(wall_time=time.time(), step=step, summary=text_pb(tag, block)))

    def close(self, outcome: RunOutcome = "finished") -> None:
        self._file.close()

    def _write(self, event: Any) -> None:
        self._record.seek(0)
        self._record.truncate()
        self._writer.write(event.SerializeToString())
        append_whole(self._file, self._record.getvalue())


def _seconds_in_names(folder: Path) -> list[int]:
    names = (path.name.split(".")[3] for path in folder.glob("events.out.tfevents.*"))
    return [int(seconds) for seconds in names if seconds.isdecimal()]


def _last_step(folder: Path) -> int:
    """Return the last step in a folder that TensorBoard shows, or -1. An incomplete last event is skipped."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto import event_pb2

    last = -1
    for path in sorted(folder.glob("events.out.tfevents.*")):
        for data in RawEventFileLoader(str(path)).Load():
            event = event_pb2.Event.FromString(data)
            if event.HasField("session_log") and event.session_log.status == event_pb2.SessionLog.START:
                last = min(last, event.step - 1)
            elif event.HasField("summary") and any(value.HasField("simple_value") for value in event.summary.value):
                last = max(last, event.step)
    return last
