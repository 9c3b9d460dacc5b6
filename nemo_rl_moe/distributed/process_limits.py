# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Limits of a process whose code a model may influence: no secrets, and bounded memory."""

import ctypes
import os
import resource
from pathlib import Path

from nemo_rl_moe.masking import is_secret


def forget_secrets() -> None:
    """Remove secrets from the environment of this process and its children."""
    for name in [name for name in os.environ if is_secret(name)]:
        del os.environ[name]
    _erase_secrets_given_at_start()


def _erase_secrets_given_at_start() -> None:
    """Erase secrets in the initial environment, which `/proc/self/environ` still shows."""
    # Fields 50 and 51 of proc(5). They are counted after the name, which may contain spaces and brackets.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    address = start
    for variable in ctypes.string_at(start, end - start).split(b"\0"):
        if is_secret(variable.partition(b"=")[0].decode(errors="replace")):
            ctypes.memset(address, 0, len(variable))
        address += len(variable) + 1


def limit_memory(megabytes: int) -> None:
    """Limit the memory of this process to its current memory plus `megabytes`."""
    status = Path("/proc/self/status").read_text()
    used = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmData:"))
    limit = (used << 10) + (megabytes << 20)
    # Not the address space (RLIMIT_AS), as Ray maps far more than it uses.
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))
