# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Atomic writes: files and folders that appear whole or not at all, whenever the program is killed."""

import os
import shutil
from contextlib import suppress
from pathlib import Path


def write_whole(path: Path, content: str | bytes, *, private: bool = False) -> None:
    """Write a file, of text in UTF-8 or of bytes; a kill or a full disk leaves it as it was.

    Args:
        private: Readable by the owner alone (mode 600).

    Raises:
        OSError: It cannot be written; the error names the file.
    """
    staging = path.with_name(f".{path.name}.incomplete")
    try:
        if private:
            staging.unlink(missing_ok=True)
            staging.touch(mode=0o600)  # before there is anything to read
        staging.write_bytes(content.encode("utf-8", "replace") if isinstance(content, str) else content)
        staging.replace(path)
    except OSError as error:
        staging.unlink(missing_ok=True)
        error.filename = error.filename or str(path)  # a full disk has none
        raise


def delete(path: Path) -> None:
    """Remove a file, a link or a whole folder, if there is one."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of files, is on the disk (fsync)."""
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
    """Rename a complete folder to its final name, replacing the folder that had the name.

    Survives a kill or a power failure at any point; on an error the old folder gets its name back.

    Args:
        staging: The complete folder, on the same file system.
        replaced: Temporary name of the old folder; anything under this name is deleted.
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
