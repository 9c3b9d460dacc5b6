# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The driver process of a run: its restart number, its stop signals, and its time limit."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, NoReturn

from nemo_rl_moe.config.schema_run import parse_duration
from nemo_rl_moe.errors import exit_code_of_signal


@dataclass(frozen=True)
class RunLaunch:
    """One launch of a run's driver process: the first one, or a restart after a failure.

    Attributes:
        run_id: Identifies the command that the user started; restarts keep it.
        restart_number: 0 for the first launch, then 1, 2, ...
        started: Start of the command on the machine's monotonic clock, in seconds; None: the start of this process.
    """

    run_id: str
    restart_number: int = 0
    started: float | None = None


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAME_REQUEST_S = 1.0
"""Signals so many seconds apart are one request: a batch system signals all processes, and the supervisor passes its
own signal on."""
STDERR = 2


class StopSignals:
    """Handlers of SIGINT and SIGTERM for a whole run: a context in the main thread of the driver.

    Outside of `graceful` the first signal raises, which stops everything in order. Inside it only sets `reason`, and
    the loop ends after its step. A second signal ends the process at once.
    """

    def __init__(self) -> None:
        self._reason: signal.Signals | None = None
        self._requested_at: float | None = None
        self._is_graceful = False
        self._former_handlers: dict[signal.Signals, Any] = {}

    def reason(self) -> str | None:
        """Name of the signal that asked the run to stop, such as "SIGTERM"; None: none did."""
        return None if self._reason is None else self._reason.name

    def end_now(self) -> None:
        """Ends the run by the signal that has asked it to stop, as if that had come outside of `graceful`."""
        if self._reason is not None:
            _raise(self._reason)

    @contextmanager
    def graceful(self) -> Iterator[None]:
        """Context of the training loop, which asks for `reason` after each step and stops by itself."""
        self._is_graceful = True
        try:
            yield
        finally:
            self._is_graceful = False

    def __enter__(self) -> "StopSignals":
        for number in STOP_SIGNALS:
            self._former_handlers[number] = signal.signal(number, self._handle)
        # The supervisor starts the driver with both held back, so that none comes before the handlers.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._former_handlers.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._requested_at is not None:
            if now - self._requested_at > SAME_REQUEST_S:
                _tell("ended at once: the run was asked to stop a second time")
                os._exit(exit_code_of_signal(number))
            return
        self._requested_at = now
        if self._is_graceful:
            self._reason = signal.Signals(number)
            _tell(f"{self._reason.name}: the run stops after this step; a second one ends it at once")
        else:
            _raise(number)


def _raise(number: int) -> NoReturn:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(exit_code_of_signal(number))


def _tell(message: str) -> None:
    """Writes a line to stderr from a signal handler, past Python's buffers, which the interrupted code may be using."""
    os.write(STDERR, f"\n{message}\n".encode())


class TimeLimit:
    """Time limit of a run: it stops after the last step behind which there is still time to save.

    Further steps and saves are taken to last as long as the longest so far; a step's validation is part of it.

    Args:
        must_save_by: Time after the start, DD:HH:MM:SS, as `checkpointing.checkpoint_must_save_by`; None: no limit.
        started: Start of the run in the clock's seconds; None: now.
        clock: Monotonic clock, in seconds.
    """

    def __init__(
        self, must_save_by: str | None, started: float | None = None, clock: Callable[[], float] = time.monotonic
    ):
        limit_s = parse_duration(must_save_by) if must_save_by is not None else None
        self._clock = clock
        self._last = clock()
        self._end = None if limit_s is None else (self._last if started is None else started) + limit_s
        self._longest_step = self._longest_saving = 0.0

    def is_up_after_step(self) -> bool:
        """True when another step like the longest one would be too long. Called once at the end of each step."""
        now = self._clock()
        self._longest_step = max(self._longest_step, now - self._last)
        self._last = now
        return self._end is not None and now + self._longest_step + self._longest_saving >= self._end

    def note_saving(self, seconds: float) -> None:
        """Records the seconds that a checkpoint took from its beginning until it was whole on the disk."""
        self._longest_saving = max(self._longest_saving, seconds)
