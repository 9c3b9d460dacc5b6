# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""`nemo-rl-moe verify`: every file of checkpoints and exported models against the checksums that were written."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from nemo_rl_moe.checksums import INVENTORY_FILE_NAME, accept_files, find_damage, read_inventory
from nemo_rl_moe.errors import ConfigurationError, DamageFoundError

SUMMARY = "compare the files of checkpoints and exported models with their checksums; damaged ones are named"
EXAMPLES = """\
examples:
  nemo-rl-moe verify logs/sft_tiny_moe/exp_001           every checkpoint of a run, and its final weights
  nemo-rl-moe verify results/grpo/step_40                one checkpoint
  nemo-rl-moe verify --accept my_model                   take the files as they are now, after you have edited some

exit code: 0 all files are what was written; 1 a file is damaged; 2 there is nothing to compare with
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="FOLDER", help="a checkpoint, an exported model, or a folder above some"
    )
    parser.add_argument(
        "--accept", action="store_true", help="write new checksums of the files as they are now, and compare nothing"
    )


def run(options: argparse.Namespace, more: Sequence[str] = ()) -> None:
    """Compares each folder, and prints a line for each that is whole.

    Args:
        options: The arguments.
        more: Folders that follow an option.

    Raises:
        ConfigurationError: A folder holds no checksums.
        DamageFoundError: Files are missing or damaged.
    """
    folders = [found for top in [*options.runs, *map(Path, more)] for found in _with_inventory(top)]
    if options.accept:
        # The innermost first: the checksum of its list of files stands in the one above.
        for folder in reversed(folders):
            accept_files(folder)
            print(f"{folder}: checksums of the files as they are now")
        return
    problems = []
    for folder in folders:
        if damage := find_damage(folder):
            problems += damage
            continue
        entries = read_inventory(folder).values()
        checked = [entry for entry in entries if entry.checksum is not None or entry.parts]
        size = sum(entry.num_bytes for entry in checked)
        if checked:
            print(f"{folder}: {len(checked)} files, {size / 1e6:,.1f} MB: all as they were written", flush=True)
        else:
            print(f"{folder}: {len(entries)} files have the sizes that an earlier release listed; it kept no checksums")
    if problems:
        raise DamageFoundError(problems)


def _with_inventory(top: Path) -> list[Path]:
    """Folders with checksums at or below one, outer ones first."""
    if not top.is_dir():
        raise ConfigurationError(f"{top}: is no folder")
    found = []
    for parent, folders, names in os.walk(top):
        # Staged, replaced and removed checkpoints of a run are nobody's any more.
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if INVENTORY_FILE_NAME in names:
            found.append(Path(parent))
    if not found:
        raise ConfigurationError(
            f"{top}: holds no {INVENTORY_FILE_NAME}: neither a checkpoint nor an exported model with checksums"
        )
    return found
