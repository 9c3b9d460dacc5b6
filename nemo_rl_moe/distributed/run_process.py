# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The process of a run: requests to stop it, and cleanup of its processes and folders at its end.

`watch_this_process` forks a watcher that outlives a killed run. The watcher finds all processes of the run, orphans
included, by a mark in their environment.
"""

import atexit
import ctypes
import gc
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn

import psutil

from nemo_rl_moe.distributed.node_tools import is_running, remove_folders_of
from nemo_rl_moe.errors import exit_code_of_signal, report_error

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Requests to stop. Batch systems announce the end of a job's time with SIGTERM or a signal that the user chooses,
often SIGUSR1."""
_LEFT_TO_STARTERS = STOP_SIGNALS[2:]
"""Signals that the run ignores if the program that starts it ignores them, as `nohup` does with SIGHUP."""
SAME_REQUEST_S = 1.0
"""Signals within this time are one request, as a batch system signals all processes of a run."""
STUBBORN_S = 10.0
"""Seconds after a second request to stop, after which the run is killed."""
LOGGERS_GRACE_S = 5.0
"""Seconds in which W&B's service process may end by itself, so that it writes all records to the disk."""
ENDING_LIMIT_S = 10.0
LEAVING_S = 15.0
"""Seconds that a run's process may take to end after its work is done."""
OWNER = "NEMO_RL_MOE_OWNER"
"""Environment variable that marks the run of a process."""
WATCHER_NAME = "run-watcher"
_ENDING_POLL_S = 0.05
_ENOUGH_LOOKS = 2
"""Number of searches in a row that must find no process of a run before all count as ended. One search may miss a
process that is just being started."""
_POLL_S = 1.0
_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36
_IN_ORDER, _REPORTED = b"\x00", b"\xff"  # other bytes in the watcher's pipe are numbers of signals
_STDERR = 2
_pipe_to_watcher: int | None = None


class StopSignals:
    """Context in the main thread that handles `STOP_SIGNALS` of a run.

    Outside of `graceful` the first signal raises an exception, which ends the run with its usual cleanup. Inside
    `graceful`, it only sets `reason`, and the training loop ends after its step. A second signal ends the process at
    once. A closed terminal (SIGHUP), SIGUSR1 and SIGUSR2 count as SIGTERM, unless the program that started the run
    ignores them, as `nohup` does.
    """

    def __init__(self) -> None:
        self._reason: signal.Signals | None = None
        self._requested_at: float | None = None
        self._is_graceful = False
        self._exit_code: int | None = None
        self._former_handlers: dict[signal.Signals, Any] = {}

    def reason(self) -> str | None:
        """Return the name of the signal that asked the run to stop, such as "SIGTERM", if one came."""
        return None if self._reason is None else self._reason.name

    def end_now(self) -> None:
        """Raise for the signal that asked the run to stop, as if it had come outside of `graceful`."""
        if self._reason is not None:
            self._raise(self._reason)

    @contextmanager
    def graceful(self) -> Iterator[None]:
        """Let a signal only set `reason` in this context. The training loop checks `reason` after each step."""
        self._is_graceful = True
        try:
            yield
        finally:
            self._is_graceful = False

    def __enter__(self) -> "StopSignals":
        for number in stop_signals():
            self._former_handlers[number] = signal.signal(number, self._handle)
        # A supervisor starts the run with these blocked, so that none comes before the handlers.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._former_handlers.items():
            signal.signal(number, handler)
        if isinstance(error, SystemExit) and self._exit_code is not None:
            error.code = self._exit_code  # Ray changes it to 1 if the signal comes while Ray waits

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._requested_at is not None:
            if now - self._requested_at > SAME_REQUEST_S:
                _write_to_stderr("ended at once: the run was asked to stop a second time")
                leave(exit_code_of_signal(as_known(number)))
            return
        self._requested_at = now
        if self._is_graceful:
            self._reason = signal.Signals(number)
            _write_to_stderr(f"{self._reason.name}: the run stops after this step; a second signal ends it at once")
        else:
            self._raise(number)

    def _raise(self, number: int) -> NoReturn:
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        self._exit_code = exit_code_of_signal(as_known(number))
        raise SystemExit(self._exit_code)


def stop_signals() -> set[signal.Signals]:
    """Return the requests to stop, except signals that this process was started to ignore."""
    ignored = {number for number in _LEFT_TO_STARTERS if signal.getsignal(number) == signal.SIG_IGN}
    return set(STOP_SIGNALS) - ignored


def as_known(number: int) -> signal.Signals:
    """Return SIGINT or SIGTERM for a stop signal, because programs that check exit codes know only these two."""
    return signal.SIGINT if number == signal.SIGINT else signal.SIGTERM


def _write_to_stderr(message: str) -> None:
    """Write a line from a signal handler, past Python's buffers, which the interrupted code may be using."""
    with suppress(OSError):  # a closed pipe must not end the run in the middle of a step
        os.write(_STDERR, f"\n{message}\n".encode())


def watch_this_process(report_end: Callable[[], None] = lambda: None) -> None:
    """Fork a watcher, which ends all processes of the run when this process ends without doing so itself.

    Requires that this process still has a single thread.

    Args:
        report_end: Called in the watcher after this process has failed, to print how to continue.
    """
    global _pipe_to_watcher
    main, owner = os.getpid(), f"{os.getpid()}-{time.time_ns()}"
    os.environ[OWNER] = owner
    # Ray overwrites the command lines of its workers with titles. Without this variable, it would overwrite their
    # environments, too.
    os.environ.setdefault("SPT_NOENV", "1")
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    watcher = os.fork()
    if watcher == 0:
        os.close(writer)
        _be_watcher(main, owner, reader, report_end)
    os.close(reader)
    os.set_blocking(writer, False)
    # Each signal with a handler is written into the pipe at once, even while the main thread hangs in a library.
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    _pipe_to_watcher = writer
    atexit.register(_end_in_order, watcher, owner)  # registered first, called last


def leave(code: int) -> NoReturn:
    """End this process at once, without exit handlers. The watcher then ends the run's other processes.

    Requires that the caller has reported the error, if there is one, because the watcher does not report it.
    """
    if _pipe_to_watcher is not None:
        with suppress(OSError):
            os.write(_pipe_to_watcher, _REPORTED)
    os._exit(code)


def limit_ending(code: int) -> None:
    """Limit the time that a finished run takes to end.

    Without a limit, a user's tool that hangs in `asyncio.to_thread` would keep the process forever, because Python
    waits for threads at its end.
    """
    if _pipe_to_watcher is not None:
        sys.stdout.flush()
        last_resort = threading.Timer(LEAVING_S, leave, [code])
        last_resort.daemon = True
        last_resort.start()


def _end_in_order(watcher: int, owner: str) -> None:
    """End all processes that this one has started, at its exit, and dismiss the watcher."""
    assert _pipe_to_watcher is not None
    _end_family(owner, spared=watcher)
    signal.set_wakeup_fd(-1)
    with suppress(OSError):
        os.write(_pipe_to_watcher, _IN_ORDER)
        os.waitpid(watcher, 0)


def _be_watcher(main: int, owner: str, reader: int, report_end: Callable[[], None]) -> NoReturn:
    """Run the watcher in the forked process, and exit."""
    try:
        gc.disable()
        os.setsid()  # away from the terminal's signals
        signal.pthread_sigmask(signal.SIG_BLOCK, {*STOP_SIGNALS, signal.SIGQUIT})  # a batch system signals it too
        _prctl(_PR_SET_NAME, WATCHER_NAME.encode())
        watch = _Watch(main, reader)
        watch.wait_for_end()
        if not watch.ended_in_order:
            _end_family(owner, main)
            if not watch.is_reported and not watch.num_requests:
                report_error(
                    f"the run's main process (pid {main}) ended before it could say why: it was killed (which is also"
                    " what happens when memory runs out), or one of Ray's servers (raylet, gcs_server) has died; all"
                    " others have been stopped"
                )
            if not (watch.is_reported and watch.num_requests):
                report_end()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


class _Watch:
    """Waits for the end of the main process, and kills it if it ignores a second request to stop."""

    def __init__(self, main: int, reader: int):
        self._main, self._reader = main, reader
        self._last_request = float("-inf")
        self.num_requests = 0
        self.ended_in_order = self.is_reported = False

    def wait_for_end(self) -> None:
        """Return when the main process has ended, or has reported that it has ended all other processes itself."""
        while os.getppid() == self._main and not self.ended_in_order:
            if select.select([self._reader], [], [], _POLL_S)[0]:
                received = os.read(self._reader, 4096)
                if not received:
                    time.sleep(_ENDING_POLL_S)  # its files are closed a moment before it ends
                for byte in received:
                    self._receive(bytes([byte]))
            if self.num_requests > 1 and time.monotonic() - self._last_request > STUBBORN_S:
                os.kill(self._main, signal.SIGKILL)
        # Bytes that were written at the end.
        while select.select([self._reader], [], [], 0)[0] and (received := os.read(self._reader, 4096)):
            for byte in received:
                self._receive(bytes([byte]))

    def _receive(self, byte: bytes) -> None:
        self.ended_in_order |= byte == _IN_ORDER
        self.is_reported |= byte == _REPORTED
        if byte[0] in STOP_SIGNALS:
            now = time.monotonic()
            self.num_requests += now - self._last_request > SAME_REQUEST_S
            self._last_request = now


def _end_family(owner: str, main: int | None = None, spared: int | None = None) -> None:
    """Kill every process of a run except `spared`, and remove the folders of these processes and of `main`."""
    start = time.monotonic()
    seen = {os.getpid() if main is None else main}
    empty_looks = 0
    while empty_looks < _ENOUGH_LOOKS:
        waited_s = time.monotonic() - start
        family = [process for process in _find_family(owner) if process.pid != spared]
        empty_looks = 0 if family else empty_looks + 1
        if waited_s > LOGGERS_GRACE_S + ENDING_LIMIT_S:
            ids = ", ".join(str(process.pid) for process in family)
            print(f"warning: {len(family)} processes of the run cannot be killed: {ids}", file=sys.stderr, flush=True)
            break
        for process in family:
            seen.add(process.pid)
            with suppress(psutil.NoSuchProcess):
                if waited_s >= LOGGERS_GRACE_S or not process.name().startswith("wandb"):
                    process.kill()
        time.sleep(_ENDING_POLL_S)
    remove_folders_of(seen)


def _find_family(owner: str) -> list[psutil.Process]:
    """Return the processes with `owner` in their environment variable `OWNER`, and the descendants of this process."""
    mark = f"{OWNER}={owner}".encode()
    found = {process.pid: process for process in psutil.Process().children(recursive=True)}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, psutil.NoSuchProcess):
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found.setdefault(int(folder.name), psutil.Process(int(folder.name)))
    found.pop(os.getpid(), None)
    return [process for process in found.values() if is_running(process)]


def adopt_orphans() -> None:
    """Make this process the parent of every orphan among its descendants, in any session."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def signal_when_parent_ends(number: signal.Signals) -> None:
    """Have the kernel send a signal to this process when its parent ends in any way."""
    _prctl(_PR_SET_PDEATHSIG, number)


def _prctl(option: int, argument: int | bytes) -> None:
    ctypes.CDLL(None).prctl(option, argument, 0, 0, 0)
