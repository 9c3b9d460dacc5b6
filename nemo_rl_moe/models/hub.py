# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Whether the hub can be reached. This is checked once, because the hub's library retries for 30 seconds per file."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from nemo_rl_moe.errors import one_line

ANSWER_WITHIN_S = 10.0
"""Seconds to wait for the hub, the same as in the hub's own library."""


@functools.cache
def hub_silence() -> str | None:
    """Return the reason why the hub cannot be reached, in one line. None if it answers or HF_HUB_OFFLINE is set.

    The hub is asked once per process.
    """
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return None
    try:
        get_session().head(constants.ENDPOINT, timeout=ANSWER_WITHIN_S)
    except Exception as error:  # network and proxy raise dozens of types
        return f"{constants.ENDPOINT}: {one_line(error)}"
    return None


def from_cache_alone() -> bool:
    """Return whether the hub cannot be reached. The value is for the option `local_files_only` of the hub's readers."""
    return hub_silence() is not None


@contextmanager
def hub_or_cache_alone() -> Iterator[None]:
    """Disable requests to an unreachable hub while the context is open, for code without `local_files_only`."""
    from huggingface_hub import constants

    with patch.object(constants, "HF_HUB_OFFLINE", constants.HF_HUB_OFFLINE or from_cache_alone()):
        yield


def hub_text_files(name: str) -> Path | None:
    """Return the folder with a local copy of a data set on the hub if its files are JSON or CSV, otherwise None.

    If the hub cannot be reached, this is the copy of an earlier call in the hub's cache.
    """
    from datasets import load_dataset_builder
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    if constants.HF_HUB_OFFLINE or from_cache_alone():
        try:
            folder = Path(snapshot_download(name, repo_type="dataset", local_files_only=True))
        except LocalEntryNotFoundError:
            return None
        names = [path.name for path in folder.rglob("*")]
        return folder if any(".json" in name or ".csv" in name for name in names) else None
    builder = load_dataset_builder(name)
    if builder.name not in ("json", "csv"):
        return None
    urls = [url for of_split in builder.config.data_files.values() for url in of_split]
    places = [url.partition("@")[2].partition("/") for url in urls]  # hf://datasets/name@revision/path
    wanted = ["README.md", *(path for _, _, path in places)]
    return Path(snapshot_download(name, repo_type="dataset", revision=places[0][0], allow_patterns=wanted))
