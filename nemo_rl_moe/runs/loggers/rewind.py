# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rewind of a run's folder to the step of the checkpoint from which the run resumes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nemo_rl_moe.errors import CheckpointError
from nemo_rl_moe.runs.folder import thumbnails
from nemo_rl_moe.runs.folder.capture_folder import CAPTURE_FOLDERS, rewind_capture
from nemo_rl_moe.runs.folder.failures import FAILURES_FILE_NAME
from nemo_rl_moe.runs.folder.lines import rewind_lines
from nemo_rl_moe.runs.folder.metrics import METRICS_FILE_NAME
from nemo_rl_moe.runs.folder.saved_samples import SAMPLES_FILE_NAME, named_thumbnails
from nemo_rl_moe.runs.folder.step_tables import rewind_steps
from nemo_rl_moe.runs.folder.thumbnails import remove_thumbnails
from nemo_rl_moe.runs.loggers.artifacts import ARTIFACTS


def rewind_run_folder(run_folder: Path, step: int) -> None:
    """Remove the output of later steps (metrics, samples, thumbnails, tables, capture), and incomplete last lines.

    This works on a full disk, since files of lines are truncated. It may also be killed in between, since truncation is
    atomic. TensorBoard, W&B and MLflow rewind their files when they are opened.

    Raises:
        CheckpointError: A file cannot be cut.
    """
    writers = [kind.writer for kind in ARTIFACTS.values()]
    of_artifacts = [name for writer in writers for name in writer.line_files]
    for name in (METRICS_FILE_NAME, SAMPLES_FILE_NAME, FAILURES_FILE_NAME, *of_artifacts):
        path = run_folder / name
        with _named_if_it_fails(path, step):
            if path.is_file():
                rewind_lines(path, step)
    with _named_if_it_fails(run_folder / thumbnails.FOLDER_NAME, step):
        remove_thumbnails(run_folder, named_thumbnails(run_folder / SAMPLES_FILE_NAME))
    for table in (writer.table for writer in writers):
        with _named_if_it_fails(run_folder / table.folder_name, step):
            rewind_steps(table, run_folder, step)
    for name in CAPTURE_FOLDERS:
        with _named_if_it_fails(run_folder / name, step):
            rewind_capture(run_folder / name, step)


@contextmanager
def _named_if_it_fails(path: Path, step: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # pyarrow's errors have long texts instead of the system's.
        reason = os.strerror(error.errno) if error.errno else error
        raise CheckpointError(
            f"{path}: cannot be rewound to step {step}, from which the run resumes: {reason}; make room for it or make"
            " it writable, or move it away"
        ) from None
