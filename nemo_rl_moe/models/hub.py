# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The hub's availability, asked once, because its library tries half a minute for every file."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from nemo_rl_moe.errors import one_line

ANSWER_WITHIN_S = 10.0
"""The time that the hub's own library gives an answer."""


@functools.cache
def hub_silence() -> str | None:
    """Return the reason, in one line, why the hub cannot be reached and only the cache is available.

    Asked once for each process. None where it answers, and where HF_HUB_OFFLINE forbids asking.
    """
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return None
    try:
        get_session().head(constants.ENDPOINT, timeout=ANSWER_WITHIN_S)
    except Exception as error:  # of the network, of a proxy: dozens of types
        return f"{constants.ENDPOINT}: {one_line(error)}"
    return None


def from_cache_alone() -> bool:
    """Return whether the hub cannot be reached, for the `local_files_only` of its readers."""
    return hub_silence() is not None


@contextmanager
def hub_or_cache_alone() -> Iterator[None]:
    """Disable requests to an unreachable hub inside; for code without `local_files_only`."""
    from huggingface_hub import constants

    with patch.object(constants, "HF_HUB_OFFLINE", constants.HF_HUB_OFFLINE or from_cache_alone()):
        yield
