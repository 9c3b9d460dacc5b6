# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks that end in every way that one can end."""

import os
import signal
import time
from collections.abc import Iterator
from typing import Any


class Measured(AssertionError):
    """A failure that carries its numbers."""

    def __init__(self, why: str):
        super().__init__(why)
        self.numbers = {"speed": 3}


def passes(*, rehearse: bool) -> Iterator[dict[str, Any]]:
    """Yield what it was told, and a second result."""
    yield {"rehearse": rehearse}
    yield {"second": 2}


def fails(*, rehearse: bool) -> Iterator[dict[str, Any]]:
    """Yield a result, then raise with numbers."""
    yield {"speed": 1}
    raise Measured("too slow")


def crashes(*, rehearse: bool) -> Iterator[dict[str, Any]]:
    """Yield a result, then die as a process does in a kernel."""
    yield {"speed": 2}
    print("about to die", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


def hangs(*, rehearse: bool) -> Iterator[dict[str, Any]]:
    """Never end, and do not listen."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    print("waiting", flush=True)
    time.sleep(600)
    yield {}
