# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Small programs in the place of a run: each starts a family that ends by nothing but SIGKILL, and notes its ids."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.functional.sft_runs import running

LIMIT_S = 200.0
PRELUDE = """
import os, signal, subprocess, sys, time
from nemo_rl_moe.distributed import run_process
from nemo_rl_moe.distributed.run_process import StopSignals, watch_this_process

def note(pid, name):
    with open(f"{pid}.part", "w") as file:
        file.write(name)
    os.rename(f"{pid}.part", f"{pid}.{name}")

def start_family():
    # One in a session of its own, whose parent has ended, and which ignores whatever can be ignored.
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    start = f"subprocess.Popen([sys.executable, '-c', {code!r}], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)"
    middle = f"import subprocess, sys; print({start}.pid)"
    out = subprocess.run([sys.executable, "-c", middle], stdout=subprocess.PIPE, start_new_session=True).stdout
    note(int(out), "orphan")
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    note(subprocess.Popen([sys.executable, "-c", code], **quiet).pid, "child")
    note(os.getpid(), "run")
"""


@contextmanager
def started(command: list[str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a program in a folder; nothing of it stays, whatever happens."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        # Whoever runs the tests under nohup has hangups ignored, and so has what they start.
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )
    try:
        yield process
    finally:
        process.kill()
        for pid in noted(folder):
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def noted(folder: Path, name: str = "*") -> list[int]:
    """Return the ids that programs in a folder have noted under a name."""
    return [int(path.stem) for path in folder.glob(f"*.{name}") if path.suffix != ".part"]


def is_running(pid: int) -> bool:
    """Return True for a process that has not ended."""
    return psutil.pid_exists(pid) and bool(running([psutil.Process(pid)]))


def wait_for_family(folder: Path, runs: int = 1) -> list[int]:
    """Return the ids of all families, once so many runs have started theirs."""
    deadline = time.monotonic() + LIMIT_S
    while len(noted(folder, "run")) < runs:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return noted(folder)


def end_of(process: subprocess.Popen[str], folder: Path) -> tuple[int, str]:
    """Return exit code and stderr, which the watcher has too: nothing that was noted may run when both have ended."""
    errors = process.communicate(timeout=LIMIT_S)[1]
    assert [pid for pid in noted(folder) if is_running(pid)] == []
    return process.returncode, errors
