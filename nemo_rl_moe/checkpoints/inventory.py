# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""`files.json`: which files a checkpoint is made of, so that one that has lost some of them is not taken for whole."""

import json
import os
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from nemo_rl_moe.checkpoints.state import read_json
from nemo_rl_moe.errors import CheckpointError

INVENTORY_FILE_NAME = "files.json"
_SIZES = TypeAdapter(dict[str, Annotated[int, Field(ge=0)]], config=ConfigDict(strict=True))


def write_inventory(folder: Path) -> None:
    """Notes the names and the sizes, in bytes, of all files that are in a checkpoint's folder.

    Raises:
        OSError: The disk did not take it.
    """
    sizes = _sizes(folder)
    sizes.pop(INVENTORY_FILE_NAME, None)
    (folder / INVENTORY_FILE_NAME).write_text(json.dumps(sizes, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def check_inventory(folder: Path) -> None:
    """Looks whether all that was noted is still there, in its size.

    Raises:
        CheckpointError: The note or a file is missing, or a file has another size; names the first such file.
    """
    path = folder / INVENTORY_FILE_NAME
    try:
        noted = _SIZES.validate_python(read_json(path))
    except ValidationError:
        raise CheckpointError(f"{path}: expected the names and the sizes of files") from None
    # What is there is looked up, and not what is noted: a name in the note leads nowhere else.
    present = _sizes(folder)
    for name, size in noted.items():
        if name not in present:
            raise CheckpointError(f"{folder / name}: is missing")
        if present[name] != size:
            raise CheckpointError(f"{folder / name}: got {present[name]} bytes, expected {size}")


def _sizes(folder: Path) -> dict[str, int]:
    sizes = {}
    for parent, _, names in os.walk(folder):
        for path in (Path(parent) / name for name in names):
            try:
                sizes[path.relative_to(folder).as_posix()] = path.stat().st_size
            except FileNotFoundError:  # its run removes the checkpoint at this moment, or a link leads nowhere
                continue
    return sizes
