# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A tool that runs Python code in a separate process without network, with limits, and with one writable folder.

The code can read all files that the user of the run can read. On machines with secrets, run everything in a container.
"""

import functools
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import IO, Annotated

from pydantic import Field

from nemo_rl_moe.tools import confined_process

MOST_BYTES = 20_000
"""Maximum number of bytes of output."""
_OUTPUT_GRACE_S = 5.0
_START_S = 60.0


Timeout = Annotated[float, Field(gt=0, le=86_400)]
Megabytes = Annotated[int, Field(ge=64, le=1_000_000)]
ALLOW_UNCONFINED = "allow_unconfined"


def python(code: str, *, timeout_s: Timeout = 5.0, memory_mb: Megabytes = 512, allow_unconfined: bool = False) -> str:
    """Run a Python program and return what it prints, errors included. Nothing is kept between two calls.

    Args:
        code: The program. Print what you want to see.
        timeout_s: Seconds after which it is ended.
        memory_mb: Most megabytes of memory of each of its processes.
        allow_unconfined: Run programs also where they cannot be confined: then they may write what the user of the run
            may write, and reach the network.
    """
    is_confined = not (allow_unconfined and problem_with_isolation({}))
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "program.py"
        program.write_text(code, "utf-8", "replace")
        process = subprocess.Popen(
            [
                *(sys.executable, "-I", confined_process.__file__, str(int(timeout_s) + 1), str(memory_mb)),
                *(str(program), "" if is_confined else confined_process.UNCONFINED),
            ],
            cwd=folder,
            env={
                "PATH": os.defpath,
                "HOME": folder,
                "TMPDIR": folder,
                "PYTHONIOENCODING": "utf-8",
                "LC_ALL": "C.UTF-8",
                # Libraries start a thread per core of the machine, which would exceed the limits.
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert process.stdout is not None
        output = _Output(process.stdout)
        try:
            exit_code: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            exit_code = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        text = output.text().replace(f'File "{program}"', "File program.py")
    return _answer(text, exit_code, timeout_s)


def problem_with_isolation(settings: Mapping[str, object]) -> str:
    """Return why programs cannot be confined on this machine, or an empty text if they can or if `settings` allows
    unconfined programs."""
    return "" if settings.get(ALLOW_UNCONFINED) is True else _problem_with_isolation()


@functools.cache
def _problem_with_isolation() -> str:
    answer = python("print('confined')", timeout_s=_START_S)
    if answer == "confined\n":
        return ""
    lines = [line for line in answer.splitlines() if line and not line.startswith("error: ")]
    reason = lines[-1] if lines else "programs cannot be confined here"
    return f"{reason}; env.driver.parameters.python.{ALLOW_UNCONFINED}: true runs programs without confinement"


class _Output:
    """Collects the first bytes of a process's output. Further output is read and dropped."""

    def __init__(self, stream: IO[bytes]):
        self._stream, self._kept, self._is_cut = stream, b"", False
        self._thread = Thread(target=self._read, daemon=True)
        self._thread.start()

    def text(self) -> str:
        """Return the collected output. Call this after the process has ended."""
        self._thread.join(_OUTPUT_GRACE_S)
        text = self._kept.decode("utf-8", "replace")
        return f"{text}\n[output cut at {MOST_BYTES:,} bytes]" if self._is_cut else text

    def _read(self) -> None:
        with suppress(OSError, ValueError), self._stream:
            while block := self._stream.read1(1 << 16):  # type: ignore[attr-defined]
                room = MOST_BYTES - len(self._kept)
                self._kept += block[:room]
                self._is_cut |= len(block) > room


def _answer(text: str, exit_code: int | None, timeout_s: float) -> str:
    if exit_code == 0:
        return text or "(no output; use print)"
    reason = f"exit code {exit_code}" if exit_code else f"the program was ended after {timeout_s:g} s"
    return f"{text}\nerror: {reason}".lstrip("\n")
