# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Cuts what a run has written after a step out of its folder, so that it can go on from there."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nemo_rl_moe.errors import CheckpointError
from nemo_rl_moe.run_folder.expert_load import FOLDER_NAME, rewind_expert_load
from nemo_rl_moe.run_folder.metrics import METRICS_FILE_NAME
from nemo_rl_moe.run_folder.samples import SAMPLES_FILE_NAME


def rewind_run_folder(run_folder: Path, step: int) -> None:
    """Cuts the metrics, the responses and the load of experts of all later steps, and last lines that a kill has torn.

    Each file of lines is cut in its place by one call of the operating system, which takes no space on the disk; a
    kill in between loses nothing that is kept. TensorBoard, W&B and MLflow see to their own when they are opened.

    Args:
        run_folder: The run's folder.
        step: The last step that is kept; -1 keeps none, not even what was measured before the first step.

    Raises:
        CheckpointError: A file cannot be cut; names it.
    """
    for name in (METRICS_FILE_NAME, SAMPLES_FILE_NAME):
        path = run_folder / name
        with _named_if_it_fails(path, step):
            if path.is_file():
                _rewind_lines(path, step)
    with _named_if_it_fails(run_folder / FOLDER_NAME, step):
        rewind_expert_load(run_folder, step)


@contextmanager
def _named_if_it_fails(path: Path, step: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # pyarrow's errors carry long texts in place of the system's.
        reason = os.strerror(error.errno) if error.errno else error
        raise CheckpointError(
            f"{path}: cannot be cut back to step {step}, from which the run goes on: {reason}; make room for it or make"
            " it writable, or move it away"
        ) from None


def _rewind_lines(path: Path, step: int) -> None:
    """Keeps the lines before the first one of a later step: steps ascend."""
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
    """The step of a record; minus infinity for a line that is none, which is not for this program to remove."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("-inf")
