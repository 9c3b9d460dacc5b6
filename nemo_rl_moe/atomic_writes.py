# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Folders that appear whole or not at all, and are on the disk when they have appeared."""

import os
import shutil
from contextlib import suppress
from pathlib import Path


def delete(path: Path) -> None:
    """Removes a file, a link or a whole folder; nothing where there is nothing.

    Raises:
        OSError: It cannot be removed.
    """
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def sync(path: Path) -> None:
    """Waits until a file, or a folder's list of files, is on the disk.

    Raises:
        OSError: The disk did not take it.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """The same of everything in a folder."""
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            sync(Path(parent) / name)
        sync(Path(parent))


def put_in_place(staging: Path, target: Path, replaced: Path) -> None:
    """Gives a folder that is complete its name; one that had it before is there until then, and comes back on failure.

    Args:
        staging: The folder.
        target: Its name, on the same file system.
        replaced: Where the one before stands meanwhile; whatever is there is deleted.

    Raises:
        OSError: The disk did not take it.
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
    with suppress(OSError):  # the new one is whole and in its place
        delete(replaced)
