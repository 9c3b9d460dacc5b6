# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""`nemo-rl-moe verify`: comparison of the files of checkpoints and exported models with their checksums."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from nemo_rl_moe.errors import ConfigurationError, DamageFoundError

SUMMARY = "compare the files of checkpoints and exported models with their checksums; damaged ones are named"
EXAMPLES = """\
examples:
  nemo-rl-moe verify results/sft_tiny_moe                every checkpoint of a run (its checkpointing.checkpoint_dir),
                                                         and its final weights
  nemo-rl-moe verify results/sft_tiny_moe/step_50        one checkpoint
  nemo-rl-moe verify --accept results/sft_tiny_moe/final
                                                         take the files as they are now, after you have edited some

exit code: 0 all files are what was written; 1 a file is damaged; 2 there is nothing to compare with
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="FOLDER",
        help="a checkpoint, an exported model, or a folder of such",
    )
    parser.add_argument(
        "--accept", action="store_true", help="write new checksums of the files as they are now, and compare nothing"
    )


def run(options: argparse.Namespace, more: Sequence[str] = ()) -> None:
    """Compare each folder with its checksums. Print a line for each undamaged folder."""
    checksums = _checksums()
    name = checksums.INVENTORY_FILE_NAME
    folders = [found for top in [*options.runs, *map(Path, more)] for found in _with_inventory(top, name)]
    if options.accept:
        # Inner folders first, as the list of an outer one has the checksum of the inner list.
        for folder in reversed(folders):
            checksums.accept_files(folder)
            print(f"{folder}: wrote checksums of the files as they are now")
        return
    problems = []
    for folder in folders:
        if damage := checksums.find_damage(folder):
            problems += damage
            continue
        entries = checksums.read_inventory(folder).values()
        checked = [entry for entry in entries if entry.checksum is not None or entry.parts]
        size = sum(entry.num_bytes for entry in checked)
        if checked:
            print(f"{folder}: {len(checked)} files, {size / 1e6:,.1f} MB: all as they were written", flush=True)
        else:
            print(f"{folder}: {len(entries)} files have the listed sizes; an earlier release listed no checksums")
    if problems:
        raise DamageFoundError(problems)


def _checksums() -> ModuleType:
    """Import and return the module `checksums`. Raise if a package that it needs is not installed."""
    try:
        from nemo_rl_moe import checksums
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"verify: needs {error.name}, which is not installed: pip install {error.name}"
        ) from None
    return checksums


def _with_inventory(top: Path, list_name: str) -> list[Path]:
    """Return all folders with checksums at or below the folder `top`, outer folders first."""
    if not top.is_dir():
        raise ConfigurationError(f"{top}: is no folder")
    found = []
    for parent, folders, names in os.walk(top):
        # Skip staged, replaced and removed checkpoints.
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if list_name in names:
            found.append(Path(parent))
    if not found:
        raise ConfigurationError(
            f"{top}: holds no {list_name}: neither a checkpoint nor an exported model with checksums"
        )
    return found
