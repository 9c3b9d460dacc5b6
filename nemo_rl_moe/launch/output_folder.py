# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Output folders of commands. They appear completely or not at all, and never replace anything."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nemo_rl_moe.atomic_writes import put_in_place
from nemo_rl_moe.errors import ConfigurationError


def is_free(target: Path) -> bool:
    """Return whether `target` does not exist or is an empty folder, as made by `mktemp -d`."""
    if target.is_symlink() or not target.is_dir():
        return not target.exists() and not target.is_symlink()
    return next(target.iterdir(), None) is None


def require_free(target: Path) -> None:
    """Check that an output folder does not exist or is empty. Raises `ConfigurationError` if not."""
    if not is_free(target):
        raise ConfigurationError(f"--output: {target} exists already; name a new or an empty folder")


def next_free(parent: Path, name: str) -> Path:
    """Return the first free folder of `NAME_001`, `NAME_002`, ..."""
    number = 1
    while not is_free(folder := parent / f"{name}_{number:03d}"):
        number += 1
    return folder


@contextmanager
def staged(target: Path) -> Iterator[Path]:
    """Yield a temporary folder in which the output is assembled. At the end, the folder is renamed to `target`.

    After an error, such as a full disk, or an interrupt, the temporary folder is removed.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    own = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield own / target.name
        if not is_free(target):
            raise ConfigurationError(f"--output: {target} has appeared meanwhile; nothing is written")
        put_in_place(own / target.name, target, own / "replaced")
    finally:
        shutil.rmtree(own, ignore_errors=True)
