# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks that end in every way that one can end."""

import os
import signal
import time
from typing import Any


class Measured(AssertionError):
    """A failure that carries its numbers."""

    def __init__(self, why: str):
        super().__init__(why)
        self.numbers = {"speed": 3}


def passes(*, rehearse: bool) -> dict[str, Any]:
    """Return what it was reported."""
    return {"rehearse": rehearse}


def fails(*, rehearse: bool) -> dict[str, Any]:
    """Raise with numbers."""
    raise Measured("too slow")


def crashes(*, rehearse: bool) -> dict[str, Any]:
    """Die as a process does in a kernel."""
    print("about to die", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)
    return {}


def hangs(*, rehearse: bool) -> dict[str, Any]:
    """Return never ends, and does not listen."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    print("waiting", flush=True)
    time.sleep(600)
    return {}
