# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Atomic writes: after a kill at any time, a file or folder is complete or does not exist."""

import os
import shutil
from contextlib import suppress
from pathlib import Path


def write_whole(path: Path, content: str | bytes, *, private: bool = False) -> None:
    """Write a text (as UTF-8) or bytes to a file. If the process is killed or the disk is full, the file is unchanged.

    Args:
        private: Whether only the owner may read the file (mode 600).

    Raises:
        OSError: The file cannot be written. `filename` of the error is set.
    """
    staging = path.with_name(f".{path.name}.incomplete")
    try:
        if private:
            staging.unlink(missing_ok=True)
            staging.touch(mode=0o600)  # before the file has content
        staging.write_bytes(content.encode("utf-8", "replace") if isinstance(content, str) else content)
        staging.replace(path)
    except OSError as error:
        staging.unlink(missing_ok=True)
        error.filename = error.filename or str(path)  # the error of a full disk has no name
        raise


def delete(path: Path) -> None:
    """Remove a file, a link or a folder with its content, if it exists."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def sync(path: Path) -> None:
    """Wait until a file, or the list of files in a folder, is on the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Wait until a folder and everything in it is on the disk."""
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            sync(Path(parent) / name)
        sync(Path(parent))


def put_in_place(staging: Path, target: Path, replaced: Path) -> None:
    """Rename a complete folder to its final name. A folder that has this name is replaced.

    After a kill or a power failure at any point, a complete folder exists. After an error, the old folder has its name
    again.

    Args:
        staging: The complete folder, on the same file system as `target`.
        replaced: Temporary name for the old folder. A file or folder with this name is deleted first.
    """
    sync_tree(staging)
    delete(replaced)
    had_one = target.is_symlink() or target.exists()
    if had_one:
        target.rename(replaced)
    try:
        staging.rename(target)
    except OSError:
        if had_one:
            replaced.rename(target)
        raise
    sync(target.parent)
    with suppress(OSError):  # the new folder is complete, so the error does not matter
        delete(replaced)
