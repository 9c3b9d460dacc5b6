# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Limits of a process that runs code which a model may steer: no secrets, and bounded memory."""

import ctypes
import os
import resource
from pathlib import Path

from nemo_rl_moe.masking import is_secret


def forget_secrets() -> None:
    """Remove variables that name secrets from this process's environment, and so from its children's."""
    for name in [name for name in os.environ if is_secret(name)]:
        del os.environ[name]
    _erase_secrets_given_at_start()


def _erase_secrets_given_at_start() -> None:
    """Erase them in the memory that `/proc/self/environ` shows, which stays as the process was started with."""
    # Behind the name, which may hold spaces and brackets; the fields of proc(5) 50 and 51.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    place = start
    for variable in ctypes.string_at(start, end - start).split(b"\0"):
        if is_secret(variable.partition(b"=")[0].decode(errors="replace")):
            ctypes.memset(place, 0, len(variable))
        place += len(variable) + 1


def limit_memory(megabytes: int) -> None:
    """Limit the memory that this process may take beyond what it has."""
    status = Path("/proc/self/status").read_text()
    used = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmData:"))
    limit = (used << 10) + (megabytes << 20)
    # Not the address space, of which Ray maps far more than it uses.
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))
