# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Functions as users write them for tools, good ones and bad ones."""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from nemo_rl_moe.tools import confined_process


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def look_up(
    word: str,
    language: Literal["en", "fr"] = "en",
    places: list[int] | None = None,
    options: dict[str, float] | None = None,
    *,
    dictionary: str,
    limit: int = 3,
) -> dict[str, object]:
    """Look a word up.

    Args:
        word: What to look for,
            in any case.
        language: Of the word.
        places: Where to look.
        options: Weights.
        dictionary: File to look in.
        limit: Most entries.

    Returns:
        The entries.
    """
    return {"word": word, "language": language, "dictionary": dictionary, "limit": limit}


def say(text: str) -> str:
    """Say a text back.

    Args:
        text: What to say.
    """
    return text


def fail(text: str) -> str:
    """Raise.

    Args:
        text: Of the error.
    """
    raise RuntimeError(text)


def sleep(seconds: float) -> str:
    """Wait.

    Args:
        seconds: How long.
    """
    time.sleep(seconds)
    return "awake"


def block(seconds: float) -> str:
    """Wait, and let nothing interrupt that.

    Args:
        seconds: How long.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            time.sleep(seconds)
        except BaseException:
            continue
    return "awake"


def die(code: int) -> str:
    """End the process.

    Args:
        code: Its exit code.
    """
    os._exit(code)


def fill(megabytes: int) -> str:
    """Take memory.

    Args:
        megabytes: How much.
    """
    return str(len(bytearray(megabytes << 20)))


def variable(name: str) -> str:
    """Read a variable of the environment.

    Args:
        name: Of the variable.
    """
    return os.environ.get(name, "not set")


def started_with(text: str) -> bool:
    """Look for a text in the environment that the process was started with.

    Args:
        text: What to look for.
    """
    return text.encode() in Path("/proc/self/environ").read_bytes()


def start_child(option: str) -> str:
    """Start a process that waits for hours, as the Python tool does, and return its number.

    Args:
        option: A word of its command line.
    """
    program = Path(tempfile.mkdtemp(), "sleeps.py")
    program.write_text("import time; time.sleep(10_000)")
    command = [sys.executable, "-I", confined_process.__file__, "60", "512", str(program), option]
    return str(subprocess.Popen(command, start_new_session=True).pid)


def without_docstring(a: int) -> int:
    return a


def without_type(a) -> int:  # type: ignore[no-untyped-def]
    """Do nothing.

    Args:
        a: Anything.
    """
    return 0


def without_description(a: int) -> int:
    """Do nothing."""
    return a


def with_class(a: list[subprocess.Popen] | None) -> int:  # type: ignore[type-arg]
    """Do nothing.

    Args:
        a: Processes.
    """
    return 0


def with_unknown_type(a: "Missing") -> int:  # type: ignore[name-defined]  # noqa: F821
    """Do nothing.

    Args:
        a: Anything.
    """
    return 0


def with_rest(*a: int) -> int:
    """Do nothing.

    Args:
        a: Numbers.
    """
    return len(a)


async def waits(a: int) -> int:
    """Wait a little.

    Args:
        a: A number.
    """
    await asyncio.sleep(0.001)
    return a


async def waits_long(a: int) -> int:
    """Wait for hours.

    Args:
        a: A number.
    """
    try:
        await asyncio.gather(asyncio.sleep(10_000))
    finally:
        os.environ["WAITS_LONG"] = "has ended"
    return a


def counts_up(a: int) -> Iterator[int]:
    """Count.

    Args:
        a: Where to begin.
    """
    yield a


nameless = lambda: 0  # noqa: E731
NUMBER = 3
