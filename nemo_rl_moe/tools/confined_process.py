# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Becomes a Python program without network, with limits of processor time, memory and files. Run as a script:

    python confined_process.py CPU_SECONDS MEGABYTES PROGRAM.py

It imports nothing of this package, so that it starts at once.
"""

import ctypes
import os
import resource
import signal
import sys

NEW_NAMESPACES = 0x10000000 | 0x20000000 | 0x40000000 | 0x00020000
"""CLONE_NEWUSER, which the others need; CLONE_NEWPID: what the program starts ends with it; CLONE_NEWNET: no network;
CLONE_NEWNS: a /proc of its own."""
MOST_FILE_BYTES = 1 << 20
_PR_SET_PDEATHSIG = 1


def run_confined(cpu_seconds: int, megabytes: int, program: str) -> None:
    """Give up the network, set limits, and become the program in a grandchild; the parents wait for its exit code."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # its parent may be ended while the program runs
    if libc.unshare(NEW_NAMESPACES) != 0:
        raise OSError(ctypes.get_errno(), "cannot give up the network")
    # In /proc lie the environments of other processes, with the secrets of the run.
    if libc.mount(b"tmpfs", b"/proc", b"tmpfs", 0, None) != 0:
        raise OSError(ctypes.get_errno(), "cannot hide the other processes")
    # The first child is process 1 of the new namespace: when it ends, whatever is left there is killed.
    for _ in range(2):
        if child := os.fork():
            _, status = os.waitpid(child, 0)
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for limit, value in (
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_AS, megabytes << 20),
        (resource.RLIMIT_FSIZE, MOST_FILE_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    os.execv(sys.executable, [sys.executable, "-I", "-B", program])


if __name__ == "__main__":
    run_confined(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
