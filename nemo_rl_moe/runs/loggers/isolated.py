# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A logger that runs its backend in a thread with a queue, so that a slow or broken backend does not stop training."""

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from nemo_rl_moe.errors import UserError
from nemo_rl_moe.runs.folder.metrics import RunOutcome, StepRecord
from nemo_rl_moe.runs.folder.sample_text import ShownSample
from nemo_rl_moe.runs.loggers.console import Notices, reason_of
from nemo_rl_moe.runs.loggers.interface import Backend, DrawPlots, SendsAlerts, ShowsSamples

_FAILURES_BEFORE_LEFT_OUT = 3


@dataclass(frozen=True)
class Patience:
    """Limits on waiting for a backend.

    Attributes:
        opening_s: Longest wait at the start for a backend to open. It may still open later.
        reopening_s: Seconds between attempts to open a backend. If the last attempt fails, the backend is dropped.
        silence_s: Number of seconds without an answer after which there is a warning.
        closing_s: Longest wait at the end for all backends together, unless a backend asks for more.
    """

    opening_s: float = 60.0
    reopening_s: tuple[float, ...] = (1.0, 3.0)
    silence_s: float = 30.0
    closing_s: float = 10.0
    most_waiting: int = 1000
    most_plots_waiting: int = 4


@dataclass(frozen=True)
class _Job:
    kind: Literal["step", "plots", "samples", "alert", "config"]
    what: str
    action: Callable[[Backend], None]


def _step_job(step: int, metrics: Mapping[str, float]) -> _Job:
    return _Job("step", f"step {step}", lambda backend: backend.log_step(step, metrics))


class IsolatedLogger:
    """Logger that runs a `Backend`, which may raise or block, in a thread.

    `log_step` only puts the step into a queue. The following faults only cause a warning:

    - If a server does not answer, steps wait in the queue until it answers again.
    - If the backend rejects a step, for example because of an invalid key, only this step is missing there.
    - If it rejects three steps in a row, for example because of a full disk or a dead server, it is dropped.
    - If it hangs at the end, it is abandoned.

    Args:
        open_backend: Function that opens the backend. It is called in the thread.
        earlier_steps: Function that reads the steps from before a resume. The backend first gets the earlier steps
            that it lacks.
        abandon: Function that is called if the backend hangs at the end, to let the process end. It must be quick.
        run_id: Id of the run at the service, if known before the backend is open.
    """

    def __init__(
        self,
        name: str,
        open_backend: Callable[[], Backend],
        notices: Notices,
        *,
        earlier_steps: Callable[[], Iterable[StepRecord]] = tuple,
        abandon: Callable[[], None] | None = None,
        run_id: str | None = None,
        patience: Patience | None = None,
    ):
        self.name = name
        self._open_backend, self._earlier_steps = open_backend, earlier_steps
        self._abandon = abandon
        self._notices = notices
        self._patience = patience or Patience()
        self.run_id = run_id
        self._backend: Backend | None = None
        # Shared by callers and the thread, guarded by `_changed`.
        self._changed = threading.Condition()
        self._waiting: deque[_Job] = deque()
        self._outcome: RunOutcome | None = None
        self._asked_at = time.monotonic()
        self._busy: tuple[str, float] | None = ("opening", time.monotonic())
        self.is_active, self._is_silent = True, False
        self._dropped: Counter[str] = Counter()
        # Only used by the thread: kind of job -> number of failures in a row.
        self._failures: Counter[str] = Counter()
        self._has_warned: set[str] = set()
        self._is_open = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"logger-{name}", daemon=True)
        self._thread.start()

    def wait_until_open(self) -> None:
        """Wait for the backend to open or to fail, up to `opening_s`."""
        if not self._is_open.wait(self._patience.opening_s):
            self._is_silent = True
            self._notices.warn(
                f"logger {self.name} did not open within {self._patience.opening_s:g} s; training starts without it, "
                f"its steps are kept (up to {self._patience.most_waiting})"
            )

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add one step to the queue. The mapping must not be changed afterwards."""
        self._put(_step_job(step, metrics))

    def log_plots(self, step: int, draw: DrawPlots) -> None:
        """Add the plots of a step to the queue, before `log_step`. `draw` runs in the thread."""

        def log(backend: Backend) -> None:
            if plots := draw():
                backend.log_plots(step, plots)

        self._put(_Job("plots", f"the plots of step {step}", log))

    def log_samples(self, step: int, split: str, samples: Sequence[ShownSample]) -> None:
        """Add samples of a step to the queue, before `log_step`. Not every backend shows them."""

        def log(backend: Backend) -> None:
            if isinstance(backend, ShowsSamples):
                backend.log_samples(step, split, samples)

        self._put(_Job("samples", f"the samples of step {step}", log))

    def send_alert(self, title: str, text: str) -> None:
        """Add an alert to the queue. Not every backend sends it."""

        def send(backend: Backend) -> None:
            if isinstance(backend, SendsAlerts):
                backend.send_alert(title, text)

        self._put(_Job("alert", "an alert", send))

    def log_config(self, config: Mapping[str, Any]) -> None:
        self._put(_Job("config", "the configuration", lambda backend: backend.log_config(config)))

    def close(self, outcome: RunOutcome = "finished") -> None:
        self.ask_to_close(outcome)
        self.wait_until_closed(time.monotonic() + self._patience.closing_s)

    def ask_to_close(self, outcome: RunOutcome) -> None:
        """Ask the backend to close after it has all steps. Return without waiting."""
        with self._changed:
            self._outcome = outcome
            self._asked_at = time.monotonic()
            self._changed.notify()

    def wait_until_closed(self, deadline: float) -> None:
        """Wait until the backend has closed, or until `deadline` (longer for an upload)."""
        try:
            self._thread.join(max(0.0, deadline - time.monotonic()))
            longer = self._backend.seconds_to_close if self._backend else 0.0
            if self._thread.is_alive() and self._outcome == "finished" and longer > self._patience.closing_s:
                self._notices.message(
                    f"waiting up to {longer:g} s for {self.name} to send remaining data (an interrupt ends the wait)"
                )
                with contextlib.suppress(KeyboardInterrupt):
                    self._thread.join(longer)
        finally:
            self.let_go()
            for kind, lost in (("step", "steps"), ("plots", "steps' plots"), ("samples", "steps' samples")):
                if number := self._dropped[kind]:
                    self._notices.warn(f"logger {self.name}: {number} {lost} were dropped while it was silent")

    def let_go(self) -> None:
        """Abandon a backend that has not closed, so that the process can end."""
        with self._changed:
            if not self._thread.is_alive() or not self.is_active:
                return
            num_waiting = self._num_waiting("step")
            self._waiting.clear()
            self.is_active = False
        self._notices.warn(
            f"logger {self.name} did not end within {time.monotonic() - self._asked_at:.0f} s and is abandoned; "
            f"{num_waiting} steps in its queue are not logged there"
        )
        if self._abandon is not None:
            with contextlib.suppress(Exception):
                self._abandon()

    def _put(self, job: _Job) -> None:
        kind = job.kind
        few = self._patience.most_plots_waiting
        limits = {"step": self._patience.most_waiting, "plots": few, "samples": few}
        with self._changed:
            if not self.is_active:
                return
            if kind in limits and self._num_waiting(kind) >= limits[kind]:
                if kind == "step" and not self._dropped[kind]:
                    self._notices.warn(f"logger {self.name} does not answer: steps are dropped from {job.what} on")
                self._dropped[kind] += 1
            else:
                self._waiting.append(job)
                self._changed.notify()
            if self._busy is not None and not self._is_silent:
                doing, since = self._busy
                if time.monotonic() - since > self._patience.silence_s:
                    self._is_silent = True
                    self._notices.warn(
                        f"logger {self.name} has not answered for {self._patience.silence_s:g} s ({doing}); training "
                        f"continues, its steps are kept (up to {self._patience.most_waiting})"
                    )

    def _work(self) -> None:
        """Run the thread: open the backend, send it earlier steps that it lacks and then the queue, and close it."""
        doing = "could not start"
        try:
            backend = self._open()
            self._backend = backend
            self.run_id = backend.run_id or self.run_id
            if backend.announcement:
                self._notices.message(backend.announcement)
            self._is_open.set()
            doing = "failed at an earlier step"
            for record in self._earlier_steps():
                if record.step > backend.last_step and self.is_active:
                    self._busy = (f"step {record.step}", time.monotonic())
                    self._do(_step_job(record.step, record.metrics), backend)
            while job := self._next_job():
                doing = f"failed at {job.what}"
                self._do(job, backend)
            if self.is_active:
                doing = "failed to close"
                self._busy = ("closing", time.monotonic())
                backend.close(self._outcome or "finished")
        except BaseException as error:  # a package may even call sys.exit
            self._leave_out(doing, error)
        finally:
            self._is_open.set()

    def _open(self) -> Backend:
        """Return the opened backend. There are several attempts: other runs may use the store, and services restart."""
        for wait_s in self._patience.reopening_s:
            try:
                return self._open_backend()
            except (ImportError, UserError):
                raise  # another attempt would fail too
            except Exception:
                with self._changed:
                    self._changed.wait_for(lambda: not self.is_active, wait_s)
        return self._open_backend()

    def _num_waiting(self, kind: str) -> int:
        return sum(job.kind == kind for job in self._waiting)

    def _next_job(self) -> _Job | None:
        with self._changed:
            self._busy = None
            if self._is_silent and self.is_active:
                self._is_silent = False
                self._notices.message(f"logger {self.name} answers again")
            while not self._waiting and self._outcome is None:
                self._changed.wait()
            if not self._waiting or not self.is_active:
                return None
            job = self._waiting.popleft()
            self._busy = (job.what, time.monotonic())
            return job

    def _do(self, job: _Job, backend: Backend) -> None:
        """Do a job. The first failure of a kind of job is a warning. Too many failing steps in a row raise an error."""
        kind = job.kind
        if kind in ("plots", "samples") and self._failures[kind] >= _FAILURES_BEFORE_LEFT_OUT:
            return
        try:
            job.action(backend)
            self._failures[kind] = 0
        except Exception as error:
            self._failures[kind] += 1
            if kind == "step" and self._failures[kind] >= _FAILURES_BEFORE_LEFT_OUT:
                raise
            if kind not in self._has_warned and self.is_active:
                self._has_warned.add(kind)
                more = "; its metrics are still logged" if kind in ("plots", "samples") else ""
                self._notices.warn(f"logger {self.name} does not take {job.what}: {reason_of(error)}{more}")

    def _leave_out(self, failure: str, error: BaseException) -> None:
        with self._changed:
            was_active, self.is_active = self.is_active, False
            self._busy = None
            self._waiting.clear()
        if was_active:
            self._notices.warn(f"logger {self.name} {failure} and is not used from here on: {reason_of(error)}")
        if self._backend is not None and failure != "failed to close":
            # To free its files and threads. A second failure after the warning is of no interest.
            with contextlib.suppress(BaseException):
                self._backend.close("failed")
