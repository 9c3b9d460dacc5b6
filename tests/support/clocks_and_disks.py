# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Clocks that tests move, and disks that fill up.

In simulated time an event loop leaps to the next timer where a real one would wait for it: hours pass in milliseconds,
and two runs of one script are the same. Where nothing is left that could ever happen, waiting is an error at once,
instead of a test that hangs.
"""

import asyncio
import resource
import selectors
import subprocess
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

Result = TypeVar("Result")
LONGEST_S = 10_000.0
"""Virtual seconds after which a script counts as one that never ends."""

MOST_TURNS = 20_000
"""Turns of the loop after which a script counts so, too: one may go on for ever without a second that passes."""


class NothingLeftError(Exception):
    """Everybody waits, and there is no timer: a deadlock. Or the script never ends."""


class _NoWaiting(selectors.DefaultSelector):
    def __init__(self, longest_s: float, most_turns: int) -> None:
        super().__init__()
        self.now_s, self.num_turns = 0.0, 0
        self._longest_s, self._most_turns = longest_s, most_turns

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise NothingLeftError("everybody waits, and nothing is left that could happen")
        self.now_s += max(0.0, timeout)
        self.num_turns += 1
        if self.now_s > self._longest_s or self.num_turns > self._most_turns:
            raise NothingLeftError(f"it goes on after {self.now_s:g} s and {self.num_turns} turns")
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time, which begins at 0; for one thread alone.

    Args:
        longest_s, most_turns: Where a script counts as one that never ends.
    """

    def __init__(self, longest_s: float = LONGEST_S, most_turns: int = MOST_TURNS) -> None:
        self._virtual = _NoWaiting(longest_s, most_turns)
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now_s

    def let_pass(self, seconds: float) -> None:
        """Let time pass in which the thread does something else, such as computing."""
        self._virtual.now_s += seconds

    def rewind(self) -> None:
        self._virtual.now_s, self._virtual.num_turns = 0.0, 0


def run_virtually(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine in virtual time; tasks that it leaves are cancelled. Errors of callbacks are raised."""
    loop, errors = VirtualLoop(), list[BaseException]()
    loop.set_exception_handler(lambda _, context: errors.append(context.get("exception") or RuntimeError(str(context))))
    try:
        result = loop.run_until_complete(coroutine)
    finally:
        loop.rewind()
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left, timeout=1.0))
        loop.close()
    if errors:
        raise errors[0]
    return result


class MovedClock:
    """Real seconds, and those by which a test has moved the clock."""

    def __init__(self) -> None:
        self._moved_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self._moved_s

    def move(self, seconds: float) -> None:
        self._moved_s += seconds

    def move_soon(self, seconds: float) -> None:
        """Move it while everything waits."""
        asyncio.get_running_loop().call_later(0.02, self.move, seconds)

    def loop(self) -> asyncio.AbstractEventLoop:
        found = asyncio.new_event_loop()
        found.time = self  # type: ignore[method-assign]
        return found


@contextmanager
def file_system_of(size: str, folder: Path) -> Iterator[Path]:
    """A file system of a size, such as `128k`, at a folder that is made; skips the test where it may not be mounted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("this user may not mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Return a new file that takes all the space that is left."""
    filler = folder / "filler"
    with pytest.raises(OSError, match="No space left"), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return filler


@contextmanager
def files_no_longer_than(size: int) -> Iterator[None]:
    """The operating system refuses what goes beyond, after it has taken what fits: a full disk for one process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
