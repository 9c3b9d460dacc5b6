# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Whether a run may go on in the folder of the run that wrote its checkpoint."""

from collections.abc import Callable
from pathlib import Path

from nemo_rl_moe.checkpoints.state import CheckpointState
from nemo_rl_moe.checkpoints.store import Checkpoint
from nemo_rl_moe.config.schema import MasterConfig
from nemo_rl_moe.loggers.run_folder import newest_run_folders, read_run_id


def run_folder_of(checkpoint: Checkpoint, config: MasterConfig, warn: Callable[[str], None]) -> Path | None:
    """The folder of the checkpoint's run, which is written to and cut back: only where it surely belongs to it.

    Args:
        checkpoint: Where the run goes on.
        config: The run's.
        warn: Gets a line where there is none.

    Returns:
        None where the checkpoint is a copy, or the folder is gone or another run's.
    """
    state, recorded = checkpoint.state, Path(checkpoint.state.run_folder)
    around = checkpoint.folder.parent.parent
    if checkpoint.folder.parent.resolve() == Path(state.checkpoint_dir):
        # The same folder under the shorter name that the user knows, where it is the same.
        folder = around if around.resolve() == recorded.resolve() else recorded
    elif config.checkpointing.checkpoint_dir is None and not _belongs_to(recorded, state):
        folder = around  # all of it was moved
    else:
        warn(f"{checkpoint.folder} is a copy: {recorded} is left as it is, and metrics go on in a new folder")
        return None
    if _belongs_to(folder, state):
        return folder
    warn(f"{folder}, which {checkpoint.folder} belongs to, is not there: metrics go on in a new folder")
    return None


def _belongs_to(run_folder: Path, state: CheckpointState) -> bool:
    return (
        run_folder in newest_run_folders(run_folder.parent)
        and (run_folder / "config.yaml").is_file()
        and state.run_folder_id is not None
        and read_run_id(run_folder) == state.run_folder_id
    )
