# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The folder of checkpoints, in which new ones are published by renaming and damaged ones are skipped."""

import contextlib
import fcntl
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from nemo_rl_moe.atomic_writes import delete, put_in_place, sync
from nemo_rl_moe.checkpoints.state import CheckpointState, read_state
from nemo_rl_moe.checksums import InventoryError, check_sizes, write_inventory
from nemo_rl_moe.config.schema_run import POLICY_ROLE
from nemo_rl_moe.errors import CheckpointError
from nemo_rl_moe.models.hf_files import MEGATRON_WEIGHTS_FOLDER

POLICY_FOLDER_NAME = MEGATRON_WEIGHTS_FOLDER
FINAL_WEIGHTS_FOLDER = "final"
"""Folder of the policy's final weights, next to the checkpoints. Other roles have a suffix, as in `final_critic`."""
LOCK_FILE_NAME = ".lock"
_LOCK_ATTEMPTS = 10
CHECKPOINT_NAME = r"step_(0|[1-9][0-9]{0,17})"
"""Pattern of the name of a checkpoint's folder."""
_COMPLETE = re.compile(CHECKPOINT_NAME)
_LEFTOVER = re.compile(rf"\.({CHECKPOINT_NAME})\.(incomplete|replaced|removed)")
_KEY = "checkpointing.checkpoint_dir"


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    folder: Path
    state: CheckpointState

    @property
    def step(self) -> int:
        """Number of steps before the checkpoint."""
        return self.state.loop.step


def model_folder(checkpoint: Path, role: str) -> Path:
    """Return the folder of a role's model in a checkpoint. For the policy, it is the checkpoint itself.

    The folder is a model in Megatron-Core's format (`config.json`, tokenizer, training state in `POLICY_FOLDER_NAME`),
    so that a run can start from it and `convert` can read it.
    """
    return checkpoint if role == POLICY_ROLE else checkpoint / role


def state_folder(checkpoint: Path, role: str) -> Path:
    return model_folder(checkpoint, role) / POLICY_FOLDER_NAME


def final_weights_folder(checkpoint_dir: Path, role: str) -> Path:
    return checkpoint_dir / (FINAL_WEIGHTS_FOLDER if role == POLICY_ROLE else f"{FINAL_WEIGHTS_FOLDER}_{role}")


def of_history(checkpoints: Sequence[Checkpoint], first_run_id: str | None) -> list[Checkpoint]:
    """Return the checkpoints of one history of training, in their order."""
    return [checkpoint for checkpoint in checkpoints if checkpoint.state.first_run_id == first_run_id]


class CheckpointStore:
    """Writes, finds and removes the checkpoints of one folder.

    Only one run may write at a time (see `locked`). Reading is always safe. Other files in the folder are untouched.

    Args:
        checkpoint_dir: Folder of checkpoints, created with the first checkpoint. All machines of a run must share it.
        warn: Called once for each unusable checkpoint.
    """

    def __init__(self, checkpoint_dir: Path, warn: Callable[[str], None] = lambda text: None):
        self.folder = checkpoint_dir
        self._warn = warn
        self._warned: set[str] = set()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Create the folder and lock it, as two runs would remove each other's checkpoints.

        Folders that were created for the lock and are still empty are removed at the end.

        Raises:
            CheckpointError: Another run uses the folder, or it is not writable.
        """
        made = [folder for folder in (self.folder, *self.folder.parents) if not folder.exists()]
        with self._lock_file():
            try:
                yield  # the operating system releases the lock if the process dies
            finally:
                with contextlib.suppress(OSError):
                    if made and [entry.name for entry in self.folder.iterdir()] == [LOCK_FILE_NAME]:
                        (self.folder / LOCK_FILE_NAME).unlink()
                        for folder in made:
                            folder.rmdir()

    def _lock_file(self) -> TextIO:
        """Create, open and lock the lock file in its folder. Return the open file."""
        path = self.folder / LOCK_FILE_NAME
        for attempt in range(_LOCK_ATTEMPTS):
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                file = path.open("w")
            except OSError as error:
                # A run that ends may be removing the folder meanwhile.
                if isinstance(error, FileNotFoundError | FileExistsError) and attempt + 1 < _LOCK_ATTEMPTS:
                    continue
                raise CheckpointError(
                    f"{_KEY}: {str(self.folder)!r} cannot hold checkpoints: {error.strerror}; it needs to be a folder"
                    " that you may write to"
                ) from None
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                break
            except OSError:
                pass  # a file system without locks
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    return file
            file.close()  # a run that ended removed the file before this one had the lock
        raise CheckpointError(
            f"{_KEY}: another run is writing to {str(self.folder)!r}; wait for it to end, or set another folder"
            " (if the key is null, set checkpointing.resume=never, which begins a new folder)"
        )

    def path_of(self, step: int) -> Path:
        return self.folder / f"step_{step}"

    def checkpoints(self) -> list[Checkpoint]:
        """Return complete checkpoints, ascending by step. Warn of damaged ones, and skip them."""
        if not self.folder.is_dir():
            return []
        found = []
        for entry in self.folder.iterdir():
            match = _COMPLETE.fullmatch(entry.name)
            if match is not None and entry.is_dir():
                try:
                    found.append(self._read(entry, int(match[1])))
                except CheckpointError as error:
                    if entry.is_dir():  # otherwise its run has removed it meanwhile
                        self._warn_once(f"{entry} is damaged and is not used: {error.problems[0]}")
        return sorted(found, key=lambda checkpoint: checkpoint.step)

    def has_any(self) -> bool:
        """Return whether a file or folder has a checkpoint's name, damaged or not."""
        return self.folder.is_dir() and any(_COMPLETE.fullmatch(entry.name) for entry in self.folder.iterdir())

    def stage(self, step: int) -> Path:
        """Create and return the empty folder in which the checkpoint of a step is assembled."""
        staging = self.staged(step)
        delete(staging)
        staging.mkdir(parents=True)
        return staging

    def staged(self, step: int) -> Path:
        """Return the folder that `stage` creates."""
        return self._leftover(step, "incomplete")

    def publish(self, step: int) -> Path:
        """Rename the staged checkpoint of a step to its final name, once it is on disk. Return the new path."""
        target = self.path_of(step)
        write_inventory(self.staged(step))
        put_in_place(self.staged(step), target, self._leftover(step, "replaced"))
        return target

    def discard(self, step: int) -> None:
        delete(self.staged(step))

    def remove(self, step: int) -> None:
        """Delete a checkpoint, so that an interrupted deletion never looks like a checkpoint."""
        removed = self._leftover(step, "removed")
        delete(removed)
        self.path_of(step).rename(removed)
        sync(self.folder)
        delete(removed)

    def sweep(self) -> None:
        """Delete leftovers of a run that was killed while writing or deleting. The caller holds the lock."""
        if not self.folder.is_dir():
            return
        for entry in sorted(self.folder.iterdir()):
            match = _LEFTOVER.fullmatch(entry.name)
            if match is None:
                continue
            try:
                if match[3] == "replaced" and not (self.folder / match[1]).exists():
                    entry.rename(self.folder / match[1])
                else:
                    delete(entry)
            except OSError as error:  # a worker of the previous run may still be writing
                self._warn_once(f"{entry}, left by a run that was stopped, cannot be cleared away: {error.strerror}")

    def _read(self, folder: Path, step: int) -> Checkpoint:
        state = read_state(folder)
        if state.loop.step != step:
            raise CheckpointError(f"{folder}: state.json: loop.step: got {state.loop.step}, expected {step}")
        if not (folder / POLICY_FOLDER_NAME).is_dir():
            raise CheckpointError(f"{folder}: holds no folder {POLICY_FOLDER_NAME}")
        try:
            check_sizes(folder)
        except InventoryError as error:
            raise CheckpointError(str(error)) from None
        return Checkpoint(folder, state)

    def _leftover(self, step: int, kind: str) -> Path:
        return self.folder / f".step_{step}.{kind}"

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            self._warn(text)
