# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The hub's presence: asked once, since its library tries half a minute to reach one that is away, for every file."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from nemo_rl_moe.errors import one_line

ANSWER_WITHIN_S = 10.0
"""The time that the hub's own library gives an answer."""


@functools.cache
def hub_silence() -> str | None:
    """Reason why the hub cannot be reached, in one line: what this machine's cache holds is all there is.

    Asked once for each process. None where it answers, and where HF_HUB_OFFLINE says that it is not to be asked, which
    the hub's library knows by itself.
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
    """True where the hub cannot be reached; for the `local_files_only` of what reads from it."""
    return hub_silence() is not None


@contextmanager
def hub_or_cache_alone() -> Iterator[None]:
    """Context in which the hub is not asked where it cannot be reached; for what takes no `local_files_only`."""
    from huggingface_hub import constants

    with patch.object(constants, "HF_HUB_OFFLINE", constants.HF_HUB_OFFLINE or from_cache_alone()):
        yield
