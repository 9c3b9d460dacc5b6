# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Cuts what a run has written after a step out of its folder, so that it can go on from there."""

import json
import os
from pathlib import Path

from nemo_rl_moe.loggers.expert_load import rewind_expert_load
from nemo_rl_moe.loggers.jsonl import METRICS_FILE_NAME
from nemo_rl_moe.loggers.samples import SAMPLES_FILE_NAME


def rewind_run_folder(run_folder: Path, step: int) -> None:
    """Cuts the metrics, the responses and the load of experts of all later steps, and last lines that a kill has torn.

    Each file is replaced at once, so that a kill in between loses nothing that is kept. TensorBoard, W&B and MLflow
    see to their own when they are opened.

    Args:
        run_folder: The run's folder.
        step: The last step that is kept; -1 keeps none, not even what was measured before the first step.
    """
    for name in (METRICS_FILE_NAME, SAMPLES_FILE_NAME):
        path = run_folder / name
        if path.is_file():
            _rewind_lines(path, step)
    rewind_expert_load(run_folder, step)


def _rewind_lines(path: Path, step: int) -> None:
    staging = path.with_name(f".{path.name}.rewound")
    with path.open("rb") as old, staging.open("wb") as new:
        for line in old:
            if line.endswith(b"\n") and _step_of(line) <= step:
                new.write(line)
        new.flush()
        os.fsync(new.fileno())
    if staging.stat().st_size < path.stat().st_size:
        staging.replace(path)
    else:
        staging.unlink()


def _step_of(line: bytes) -> float:
    """The step of a record; minus infinity for a line that is none, which is not for this program to remove."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("-inf")
