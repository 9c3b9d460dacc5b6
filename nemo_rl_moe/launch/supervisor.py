# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The supervisor of a run: two light processes that pass on signals, restart the driver, and leave no process behind.

The front is the process that the user started. It forks the guardian, which starts the driver. Each of the three can be
killed: the front inherits and ends what a guardian leaves, the guardian what a driver leaves, and it ends all when the
front is gone.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NoReturn

import psutil

from nemo_rl_moe.distributed.node_tools import remove_folders_of
from nemo_rl_moe.errors import EXIT_FAILURE_TOLD, EXIT_RUN_FAILED, exit_code_of_signal, printable
from nemo_rl_moe.launch.driver_process import SAME_REQUEST_S, STOP_SIGNALS

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
ENDING_POLL_S = 0.05
ENDING_LIMIT_S = 10.0
ENOUGH_LOOKS = 2
"""Looks at all processes in a row that find none left. One is no proof: a process whose parent ends during the look may
be missed, and is this process's own child in the next."""


def adopt_orphans() -> None:
    """Makes this process the parent of every orphan among its descendants, whatever session that is in."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def signal_when_parent_ends(number: signal.Signals) -> None:
    """Sends a signal to this process when its parent ends, in whatever way."""
    _prctl(PR_SET_PDEATHSIG, number)


def end_descendants(spared: Collection[psutil.Process] = (), loggers_grace_s: float = 0.0) -> list[int]:
    """Kills every descendant of this process, again and again until none is left, and collects their exit codes.

    What they cannot remove themselves then, their temporary folders, is removed.

    Args:
        spared: Children that are left alone, with all that they have started.
        loggers_grace_s: Seconds to wait for W&B's writer, which ends by itself after the driver, with all records on
            the disk.

    Returns:
        Ids of processes that cannot be killed, such as those that wait for a dead disk.
    """
    start = time.monotonic()
    seen: set[int] = set()
    empty_looks = 0
    while True:
        waited_s = time.monotonic() - start
        family = _running_descendants(spared, seen)
        empty_looks = 0 if family else empty_looks + 1
        if empty_looks == ENOUGH_LOOKS or waited_s > loggers_grace_s + ENDING_LIMIT_S:
            remove_folders_of(seen)
            return [process.pid for process in family]
        for process in family:
            with suppress(psutil.NoSuchProcess):
                if waited_s >= loggers_grace_s or not process.name().startswith("wandb"):
                    process.kill()
        time.sleep(ENDING_POLL_S)


def _running_descendants(spared: Collection[psutil.Process], seen: set[int]) -> list[psutil.Process]:
    """Descendants that run; adds to `seen` the ids of all, also of those that have just ended."""
    running: list[psutil.Process] = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if child in spared:
                continue
            for process in (child, *child.children(recursive=True)):
                seen.add(process.pid)
                if process.status() != psutil.STATUS_ZOMBIE:
                    running.append(process)
                elif process.ppid() == os.getpid():
                    _reap(process.pid)
    return running


def _reap(pid: int) -> None:
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def _prctl(option: int, argument: int) -> None:
    ctypes.CDLL(None).prctl(option, argument, 0, 0, 0)


FRONT_ENDED = signal.SIGUSR2
LOGGER_SERVICE_GRACE_S = 5.0
LONGEST_WAIT_S = 30.0
POLL_S = 1.0


@dataclass(frozen=True)
class Supervision:
    """Command to run under supervision.

    Attributes:
        driver_command: Returns the driver's command, given the number of restarts so far.
        environment: Variables in addition to this process's own.
        max_restarts: Number of restarts of a driver that fails.
        resume_hint: Returns a line on how to resume a run that has failed; None where it has no checkpoint.
        restart_wait_s: Seconds before the first restart; doubles with each.
        stubborn_s: Seconds that the driver has left after a second request to stop.
    """

    driver_command: Callable[[int], Sequence[str]]
    environment: Mapping[str, str] = field(default_factory=dict)
    max_restarts: int = 0
    resume_hint: Callable[[], str | None] = lambda: None
    restart_wait_s: float = 1.0
    stubborn_s: float = 10.0


def supervise(supervision: Supervision) -> int:
    """Runs a driver to its end, and ends everything that it has started.

    Returns:
        The exit code: the driver's own, 1 where it was killed, 128 and the signal's number where it was stopped.
    """
    others = set(psutil.Process().children())
    adopt_orphans()
    sys.stdout.flush()
    sys.stderr.flush()
    stop_signals = {*STOP_SIGNALS}
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores it
        stop_signals.add(signal.SIGHUP)
    # Held back from here on and asked for in turn, so that none is lost between two looks.
    former_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*stop_signals, signal.SIGCHLD, FRONT_ENDED})
    try:
        guardian = os.fork()
        if guardian == 0:
            _be_guardian(supervision, stop_signals)
        exit_code = _wait_for_guardian(guardian, stop_signals)
        if left := end_descendants(others):
            _tell(f"warning: {len(left)} processes of the run cannot be killed: {', '.join(map(str, left))}")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former_mask)
    if exit_code >= 0:
        return exit_code
    _tell(f"error: the run's supervisor {_how_it_ended(exit_code)}; all of its processes have been stopped")
    _tell_resume(supervision)
    return EXIT_RUN_FAILED


def _wait_for_guardian(guardian: int, stop_signals: set[signal.Signals]) -> int:
    while True:
        ended, status = os.waitpid(guardian, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        received = signal.sigtimedwait({*stop_signals, signal.SIGCHLD}, POLL_S)
        if received is not None and received.si_signo in stop_signals:
            os.kill(guardian, received.si_signo)


def _be_guardian(supervision: Supervision, stop_signals: set[signal.Signals]) -> NoReturn:
    """Body of the forked process, which never returns into the code that has called `supervise`."""
    exit_code = EXIT_RUN_FAILED
    try:
        front = os.getppid()
        signal_when_parent_ends(FRONT_ENDED)
        adopt_orphans()
        os.setsid()  # out of the terminal's reach: the front passes on what comes from there
        exit_code = _Guardian(supervision, stop_signals, front).run()
    except BaseException as error:
        if not isinstance(error, _FrontEndedError):
            traceback.print_exc()
        end_descendants()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)


class _FrontEndedError(Exception):
    """The front has been killed: nobody waits for the run any more."""


class _Requests:
    """Requests to stop, each of which may arrive as several signals."""

    def __init__(self) -> None:
        self._last_at = float("-inf")
        self._number = 0
        self.last: signal.Signals | None = None
        """Signal that was passed on last; None: no request yet."""

    def receive(self, number: int) -> signal.Signals | None:
        """Signal to pass on; None for one that belongs to the request before it."""
        now = time.monotonic()
        is_same, self._last_at = now - self._last_at <= SAME_REQUEST_S, now
        if is_same:
            return None
        self._number += 1
        # A closed terminal asks for the same as SIGTERM.
        self.last = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
        return self.last

    def is_overdue(self, stubborn_s: float) -> bool:
        """True when a second request has not been followed within so many seconds."""
        return self._number > 1 and time.monotonic() - self._last_at > stubborn_s


class _Guardian:
    """Starts the driver, and again after failures; ends what a driver leaves behind."""

    def __init__(self, supervision: Supervision, stop_signals: set[signal.Signals], front: int):
        self._supervision = supervision
        self._stop_signals = stop_signals
        self._front = front
        self._requests = _Requests()

    def run(self) -> int:
        """Runs the driver, again after each failure while restarts are left; returns the exit code of the run."""
        most = self._supervision.max_restarts
        restarts = 0
        while True:
            driver = self._start(restarts)
            exit_code = self._wait_for_driver(driver)
            end_descendants(loggers_grace_s=LOGGER_SERVICE_GRACE_S)
            remove_folders_of([driver])  # of one that was killed
            request = self._requests.last
            if request is not None and exit_code < 0:
                return exit_code_of_signal(request)
            if request is not None and exit_code == EXIT_RUN_FAILED:
                # Ray ends a driver so when one of its servers goes before it, as may happen in a stop.
                _tell_resume(self._supervision)
                return exit_code_of_signal(request)
            if exit_code not in (EXIT_FAILURE_TOLD, EXIT_RUN_FAILED) and exit_code >= 0:
                return exit_code
            if exit_code == EXIT_FAILURE_TOLD:
                how = f"ended with exit code {EXIT_RUN_FAILED}"
            else:
                how = _how_it_ended(exit_code)
                _tell(f"error: the run's main process {how}; all others have been stopped")
            if request is not None or restarts >= most:
                _tell_resume(self._supervision)
                return EXIT_RUN_FAILED
            wait_s = min(LONGEST_WAIT_S, self._supervision.restart_wait_s * 2**restarts)
            restarts += 1
            _tell(f"restart {restarts} of {most}: the run's main process {how}; it starts again in {wait_s:g} s")
            received = signal.sigtimedwait({*self._stop_signals, FRONT_ENDED}, wait_s)
            self._look_for_front()
            if received is not None and received.si_signo in self._stop_signals:
                return exit_code_of_signal(received.si_signo)

    def _start(self, restart_number: int) -> int:
        guardian = os.getpid()

        def prepare() -> None:
            signal_when_parent_ends(signal.SIGKILL)
            if os.getppid() != guardian:
                os._exit(EXIT_RUN_FAILED)
            # Shells let their background jobs ignore SIGINT, which everything started from there would inherit.
            for number in (*STOP_SIGNALS, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            # The driver lets them through when it has its handlers.
            signal.pthread_sigmask(signal.SIG_SETMASK, STOP_SIGNALS)

        driver = subprocess.Popen(
            list(self._supervision.driver_command(restart_number)),
            env={**os.environ, **self._supervision.environment},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=prepare,
        )
        driver.returncode = 0  # its exit code is waited for elsewhere; Popen is not to ask for it
        return driver.pid

    def _wait_for_driver(self, driver: int) -> int:
        is_killed = False
        while (exit_code := self._collect(driver)) is None:
            received = signal.sigtimedwait({*self._stop_signals, signal.SIGCHLD, FRONT_ENDED}, POLL_S)
            self._look_for_front()
            if received is not None and received.si_signo in self._stop_signals:
                if passed_on := self._requests.receive(received.si_signo):
                    os.kill(driver, passed_on)
            elif self._requests.is_overdue(self._supervision.stubborn_s) and not is_killed:
                is_killed = True
                os.kill(driver, signal.SIGKILL)
        return exit_code

    def _collect(self, driver: int) -> int | None:
        """Collects the exit codes of children that have ended, adopted orphans too, which stay as zombies until then.

        Returns:
            The driver's exit code, negative where a signal has killed it; None while it runs.
        """
        while True:
            ended, status = os.waitpid(-1, os.WNOHANG)
            if ended in (0, driver):
                return os.waitstatus_to_exitcode(status) if ended else None

    def _look_for_front(self) -> None:
        if os.getppid() != self._front:
            raise _FrontEndedError


def _how_it_ended(exit_code: int) -> str:
    if exit_code >= 0:
        return (
            f"ended with exit code {exit_code} before it could tell why; Ray ends it so when one of its"
            " servers (raylet, gcs_server) has died"
        )
    name = next((number.name for number in signal.Signals if number == -exit_code), f"signal {-exit_code}")
    because = " (which is also what happens when memory runs out)" if -exit_code == signal.SIGKILL else ""
    return f"was killed by {name}{because}"


def _tell_resume(supervision: Supervision) -> None:
    if hint := supervision.resume_hint():
        _tell(hint)


def _tell(message: str) -> None:
    print(printable(message), file=sys.stderr, flush=True)
