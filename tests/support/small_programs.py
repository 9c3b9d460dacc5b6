# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Small programs and checks in the place of real ones: of a run, of cases of a campaign, and of a GPU."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

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
    from tests.functional.sft_runs import running  # with all that runs import, which the programs do without

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


class Measured(AssertionError):
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


def main() -> int:
    """Run the cases named, one after the other: each does what its name says, and none computes anything."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--here", action="store_true")
    parser.add_argument("--cases", nargs="+")
    options = parser.parse_args()
    for name in options.cases:
        if name == "exits":
            return 7
        if name == "hangs":
            time.sleep(1000)
        if name == "leaves":
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
        faults = ["step 1: a token is lost"] if name == "fails" else []
        folder = options.output / name
        folder.mkdir(parents=True)
        staging = folder / "staging"
        staging.write_text(json.dumps({"case": name, "settings": "", "faults": faults, "seconds": 1.0}))
        staging.rename(folder / "result.json")
        if faults:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
