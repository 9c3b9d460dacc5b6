# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Thumbnails beside the samples of a page: inside of the page itself, few and small."""

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_rl_moe.errors import DataError
from nemo_rl_moe.runs.folder.thumbnails import read_thumbnail

MOST_IMAGES = 48
"""Images of a page, however many runs it is about."""


def embedded_thumbnails(
    run_folder: Path, samples: Sequence[Mapping[str, Any]], most: int, budget: int, notes: list[str]
) -> dict[str, str]:
    """Return the PNG files in base64 by name, within `budget` characters; `notes` gets a line on those left out."""
    names = dict.fromkeys(name for sample in samples for name in sample.get("thumbnails", ()))
    found: dict[str, str] = {}
    problems: list[str] = []
    num_left_out = 0
    for name in names:
        try:
            text = base64.b64encode(read_thumbnail(run_folder, name)).decode("ascii")
        except DataError as error:
            problems += error.problems
            continue
        if len(found) < most and len(text) <= budget:
            found[name] = text
            budget -= len(text)
        else:
            num_left_out += 1
    if problems:
        notes.append(f"images of samples that cannot be shown: {len(problems)}, the first of them {problems[0]}")
    if num_left_out:
        notes.append(f"images of samples that are left out: {num_left_out}; the page has room for {len(found)}")
    return found
