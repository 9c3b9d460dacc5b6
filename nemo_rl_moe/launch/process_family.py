# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Processes and all that they start: who inherits the orphans, and how the last of them is ended."""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Collection
from contextlib import suppress

import psutil

from nemo_rl_moe.distributed.node_tools import ProcessIdentity

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.05


def adopt_orphans() -> None:
    """Makes this process the parent of every descendant whose own parent ends, whatever session it is in."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def signal_when_parent_ends(number: signal.Signals) -> None:
    """Sends a signal to this process when its parent ends, in whatever way."""
    _prctl(PR_SET_PDEATHSIG, number)


def end_descendants(
    spared: Collection[ProcessIdentity] = (),
    *,
    has_grace: Callable[[psutil.Process], bool] = lambda process: False,
    grace_s: float = 0.0,
    timeout_s: float = 10.0,
) -> list[int]:
    """Kills every descendant of this process, again and again until none is left, and collects their exit codes.

    Args:
        spared: Children that go on, with all that they have started.
        has_grace: Which processes may end by themselves.
        grace_s: Seconds that they have for it.
        timeout_s: Seconds that all of this may take after the grace.

    Returns:
        The ids of those that cannot be killed.
    """
    start = time.monotonic()
    while True:
        waited_s = time.monotonic() - start
        family = _running_descendants(spared)
        if not family or waited_s > grace_s + timeout_s:
            return [process.pid for process in family]
        for process in family:
            with suppress(psutil.NoSuchProcess):
                if waited_s >= grace_s or not has_grace(process):
                    process.kill()
        time.sleep(POLL_S)


def _running_descendants(spared: Collection[ProcessIdentity]) -> list[psutil.Process]:
    running: list[psutil.Process] = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if ProcessIdentity.of(child) in spared:
                continue
            for process in (child, *child.children(recursive=True)):
                if process.status() != psutil.STATUS_ZOMBIE:
                    running.append(process)
                elif process.ppid() == os.getpid():
                    _reap(process.pid)
    return running


def _reap(pid: int) -> None:
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def _prctl(option: int, argument: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, argument, 0, 0, 0)
