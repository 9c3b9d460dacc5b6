# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The supervisor of a run with `cluster.max_restarts`: it restarts the run's process after failures, and forwards
signals to it."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

from nemo_rl_moe.distributed.run_process import (
    ENDING_LIMIT_S,
    LOGGERS_GRACE_S,
    STOP_SIGNALS,
    adopt_orphans,
    as_known,
    signal_when_parent_ends,
    stop_signals,
)
from nemo_rl_moe.errors import EXIT_RUN_FAILED, exit_code_of_signal, printable

LONGEST_WAIT_S = 30.0
POLL_S = 1.0
CLEARING_LIMIT_S = LOGGERS_GRACE_S + ENDING_LIMIT_S + 15.0
"""Seconds to wait until the watcher of a failed run has ended the run's remaining processes."""


@dataclass(frozen=True)
class Supervision:
    """A run under supervision.

    Attributes:
        command: Function from the number of restarts so far to the command line of the run's process.
        stdin: Standard input of the process: the resolved configuration, which may contain secrets.
        resume_hint: Function that returns a line on how to resume a failed run, or None without a checkpoint.
        restart_wait_s: Seconds to wait before the first restart. Doubled for each further restart.
    """

    command: Callable[[int], Sequence[str]]
    stdin: str
    max_restarts: int
    resume_hint: Callable[[], str | None]
    restart_wait_s: float = 1.0


def supervise(supervision: Supervision) -> int:
    """Run a process to its end, and restart it after each failure while restarts remain.

    Return the exit code of the last process, 1 if the process was killed, or 128 plus the signal's number if the user
    stopped it.
    """
    adopt_orphans()
    awaited = stop_signals()
    # Signals are blocked from here on and polled, so that none is lost between two polls.
    former_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*awaited, signal.SIGCHLD})
    try:
        with tempfile.TemporaryFile("w+", encoding="utf-8") as stdin:  # without a name: no secrets remain
            stdin.write(supervision.stdin)
            stdin.flush()
            return _Supervisor(supervision, awaited, stdin).run()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former_mask)


class _Supervisor:
    """Starts the run's process, waits for it, and restarts it after failures."""

    def __init__(self, supervision: Supervision, stop_signals: set[signal.Signals], stdin: IO[str]):
        self._supervision = supervision
        self._stop_signals = stop_signals
        self._stdin = stdin
        self._request: signal.Signals | None = None

    def run(self) -> int:
        """Run and restart the process, and return the exit code of the run."""
        most = self._supervision.max_restarts
        restarts = 0
        while True:
            exit_code = self._wait_for(self._start(restarts))
            _wait_until_cleared()
            if self._request is not None and exit_code < 0:
                return exit_code_of_signal(as_known(self._request))
            if exit_code >= 0 and exit_code != EXIT_RUN_FAILED:
                return exit_code
            if self._request is not None or restarts >= most:
                if hint := self._supervision.resume_hint():
                    _say(hint)
                return EXIT_RUN_FAILED
            wait_s = min(LONGEST_WAIT_S, self._supervision.restart_wait_s * 2**restarts)
            restarts += 1
            how = _how_it_ended(exit_code)
            _say(f"restart {restarts} of {most}: the run's main process {how}; it starts again in {wait_s:g} s")
            received = signal.sigtimedwait(self._stop_signals, wait_s)
            if received is not None:
                return exit_code_of_signal(as_known(received.si_signo))

    def _start(self, restart_number: int) -> int:
        supervisor = os.getpid()

        def prepare() -> None:
            signal_when_parent_ends(signal.SIGKILL)
            if os.getppid() != supervisor:
                os._exit(EXIT_RUN_FAILED)
            # Background jobs of a shell ignore SIGINT, and their child processes inherit this.
            for number in STOP_SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            # The run unblocks these signals when its handlers are installed.
            signal.pthread_sigmask(signal.SIG_SETMASK, STOP_SIGNALS)

        self._stdin.seek(0)
        process = subprocess.Popen(
            list(self._supervision.command(restart_number)),
            stdin=self._stdin,
            start_new_session=True,  # so it gets the terminal's signals only from this process
            preexec_fn=prepare,
        )
        process.returncode = 0  # so that Popen does not wait for the exit code, as `_collect` does
        return process.pid

    def _wait_for(self, process: int) -> int:
        while (exit_code := _collect(process)) is None:
            received = signal.sigtimedwait({*self._stop_signals, signal.SIGCHLD}, POLL_S)
            if received is not None and received.si_signo in self._stop_signals:
                # The run has no terminal, so when the terminal is closed it gets SIGTERM.
                is_closed = received.si_signo == signal.SIGHUP
                self._request = signal.SIGTERM if is_closed else signal.Signals(received.si_signo)
                os.kill(process, self._request)
        return exit_code


def _collect(process: int) -> int | None:
    """Return the exit code of the run's process, or None while the process runs. The code is negative if a signal
    killed the process."""
    while True:  # other children that have ended are collected too, since they stay zombies otherwise
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended in (0, process):
            return os.waitstatus_to_exitcode(status) if ended else None


def _wait_until_cleared() -> None:
    """Wait until the watcher of the ended process has ended the run's orphans, so that this process has no children."""
    deadline = time.monotonic() + CLEARING_LIMIT_S
    with suppress(ChildProcessError):
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                signal.sigtimedwait({signal.SIGCHLD}, POLL_S)


def _how_it_ended(exit_code: int) -> str:
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    name = next((number.name for number in signal.Signals if number == -exit_code), f"signal {-exit_code}")
    because = " (which is also what happens when memory runs out)" if -exit_code == signal.SIGKILL else ""
    return f"was killed by {name}{because}"


def _say(message: str) -> None:
    print(printable(message), file=sys.stderr, flush=True)
