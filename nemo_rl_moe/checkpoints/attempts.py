# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Notes, beside checkpoints, which run has gone on from them: its later attempts look nowhere else."""

import json
from pathlib import Path

from nemo_rl_moe.checkpoints.state import read_json
from nemo_rl_moe.errors import CheckpointError

NOTE_FILE_NAME = ".going_on.json"


def note_history(checkpoint_dir: Path, run_id: str, first_run_id: str) -> None:
    """Notes that a run goes on from a history of training; of several runs, the last one is noted.

    A disk that does not take it is passed over: a later attempt then looks for checkpoints as a first one does.

    Args:
        checkpoint_dir: Where the checkpoint lies.
        run_id: The run's.
        first_run_id: The history's.
    """
    staging = checkpoint_dir / f"{NOTE_FILE_NAME}.incomplete"
    try:
        staging.write_text(json.dumps({"run_id": run_id, "first_run_id": first_run_id}) + "\n", encoding="utf-8")
        staging.replace(checkpoint_dir / NOTE_FILE_NAME)
    except OSError:
        pass


def noted_history(checkpoint_dir: Path, run_id: str) -> str | None:
    """The `first_run_id` of the history that a run has gone on from in this folder; None where none is noted."""
    try:
        note = read_json(checkpoint_dir / NOTE_FILE_NAME)
    except CheckpointError:
        return None
    if not isinstance(note, dict) or note.get("run_id") != run_id:
        return None
    history = note.get("first_run_id")
    return history if isinstance(history, str) else None
