# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A clock in a process of its own, which ends the process that it watches when one piece of its work takes too long.

What is judged shares its process with whatever it calls: alarms and timers of that process can be cancelled by it, and
libraries with time limits of their own do so.
"""

import os
import subprocess
import sys

_PIECE, _REST = b"p", b"r"
# Signals are for the processes that they were meant for; the clock ends when the watched process does. That may be
# known by the end of the pipe or, where a child of its own still holds it, by the parent's number.
_PROGRAM = f"""\
import os, select, signal, sys
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
watched, limit_s, working = int(sys.argv[1]), float(sys.argv[2]), False
while os.getppid() == watched:
    if select.select([0], [], [], limit_s if working else 5.0)[0]:
        news = os.read(0, 65536)
        if not news:
            break
        working = news.endswith({_PIECE!r})
    elif working and os.getppid() == watched:
        os.kill(watched, signal.SIGKILL)
        break
"""


class Stopwatch:  # pragma: no cover  (runs in other processes)
    """Clock over this process.

    Args:
        limit_s: Seconds that one piece of work may take before this process is killed, whatever it is doing.
    """

    def __init__(self, limit_s: float):
        command = [sys.executable, "-I", "-S", "-c", _PROGRAM, str(os.getpid()), str(limit_s)]
        self._clock = subprocess.Popen(command, stdin=subprocess.PIPE)

    def start_piece(self) -> None:
        """Begins a piece of work, and so ends the one before."""
        self._tell(_PIECE)

    def rest(self) -> None:
        """Ends the last piece of work; nothing is timed until the next one."""
        self._tell(_REST)

    def _tell(self, news: bytes) -> None:
        assert self._clock.stdin is not None
        self._clock.stdin.write(news)
        self._clock.stdin.flush()
