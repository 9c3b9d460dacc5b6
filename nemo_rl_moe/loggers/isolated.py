# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A backend in a thread of its own: whatever it does, the caller goes on at once."""

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from nemo_rl_moe.loggers.accepted_keys import write_what_is_accepted
from nemo_rl_moe.loggers.interface import Backend, DrawPictures, SendsAlerts
from nemo_rl_moe.loggers.load_pictures import PictureSender
from nemo_rl_moe.loggers.notices import Notices, reason_of
from nemo_rl_moe.run_folder.metrics import RunOutcome, StepRecord

_REFUSALS_BEFORE_A_KEY_IS_LEFT_OUT = 3
_KEYS_NAMED = 5


@dataclass(frozen=True)
class Patience:
    """How long a backend is waited for.

    Attributes:
        opening_s: Seconds that the start waits for a backend to open; it may still open later.
        silence_s: Seconds without an answer after which the user is told.
        closing_s: Seconds that the end waits for all backends together, where a backend itself does not ask for more.
        most_waiting: Steps that wait for a backend before further ones are dropped.
        most_pictures_waiting: Steps whose pictures wait before those of further ones are dropped.
    """

    opening_s: float = 60.0
    silence_s: float = 30.0
    closing_s: float = 10.0
    most_waiting: int = 1000
    most_pictures_waiting: int = 4


@dataclass(frozen=True)
class _Job:
    kind: Literal["step", "pictures", "other"]
    what: str
    action: Callable[[Backend], None]


class IsolatedLogger:
    """A `MetricLogger` in front of one `Backend` that may raise, block or reject keys.

    `log_step` only puts the step into a queue. A backend that blocks is told to the user once and finds its steps
    when it answers again; one that rejects keys gets the others; one that fails in general is left out. All warnings
    go to `notices`, which the caller shows.

    Args:
        name: What warnings call the backend.
        open_backend: Opens it; called in the thread.
        notices: Where lines for the user go.
        earlier_steps: Reads the steps that were logged before this attempt of the run; those that the backend lacks
            are sent to it first.
        abandon: Called where the backend blocks at the end: sees that the process can end all the same. Quick.
        run_id: By what the service finds the run again, where that is known before it is open.
        patience: How long it is waited for.
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
        self._run_id = run_id
        self._backend: Backend | None = None
        # What the caller and the thread both touch; `_changed` guards it.
        self._changed = threading.Condition()
        self._waiting: deque[_Job] = deque()
        self._outcome: RunOutcome | None = None
        self._asked_at = time.monotonic()
        self._busy: tuple[str, float] | None = ("opening", time.monotonic())
        self._is_active, self._is_silent = True, False
        self._dropped: Counter[str] = Counter()
        # What only the thread touches.
        self._refusals: Counter[str] = Counter()
        self._picture_sender = PictureSender(name, notices)
        self._is_open = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"logger-{name}", daemon=True)
        self._thread.start()

    @property
    def is_active(self) -> bool:
        """Whether the backend still takes part."""
        return self._is_active

    @property
    def run_id(self) -> str | None:
        """By what the service finds the run again; None while it is not known."""
        return self._run_id

    def wait_until_open(self) -> None:
        """Waits for the backend to open or to fail, at most as long as patience lasts."""
        if not self._is_open.wait(self._patience.opening_s):
            self._is_silent = True
            self._notices.warn(
                f"logger {self.name} did not open within {self._patience.opening_s:g} s; training starts without it, "
                f"its steps are kept (up to {self._patience.most_waiting})"
            )

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queues one step; the mapping is not to be changed afterwards."""
        self._put("step", f"step {step}", lambda backend: self._write_step(backend, step, metrics))

    def log_pictures(self, step: int, draw: DrawPictures) -> None:
        """Queues the pictures of a step, to be drawn in the thread; called before the step itself."""
        self._put("pictures", f"the pictures of step {step}", lambda b: self._picture_sender.send(b, step, draw))

    def send_alert(self, title: str, text: str) -> None:
        """Queues an alert, for a backend that sends any."""
        self._put("other", "an alert", lambda backend: self._send_alert(backend, title, text))

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Queues the configuration."""
        self._put("other", "the configuration", lambda backend: self._write_config(backend, config))

    def close(self, outcome: RunOutcome = "finished") -> None:
        """Asks the backend to close and waits for it."""
        self.ask_to_close(outcome)
        self.wait_until_closed(time.monotonic() + self._patience.closing_s)

    def ask_to_close(self, outcome: RunOutcome) -> None:
        """Lets the backend close when it has got all steps; returns at once."""
        with self._changed:
            self._outcome = outcome
            self._asked_at = time.monotonic()
            self._changed.notify()

    def wait_until_closed(self, deadline: float) -> None:
        """Waits until the backend has closed, after `ask_to_close`; then it is let go, and the user told.

        Args:
            deadline: On the clock of `time.monotonic`. A backend that asks for more, as one that uploads, gets it if
                the run finished; an interrupt ends that wait.
        """
        try:
            self._thread.join(max(0.0, deadline - time.monotonic()))
            longer = self._backend.seconds_to_close if self._backend else 0.0
            if self._thread.is_alive() and self._outcome == "finished" and longer > self._patience.closing_s:
                self._notices.message(
                    f"waiting up to {longer:g} s for {self.name} to send what is left (an interrupt ends the wait)"
                )
                self._notices.show()
                with contextlib.suppress(KeyboardInterrupt):
                    self._thread.join(longer)
        finally:
            self.let_go()
            for kind, lost in (("step", "steps"), ("pictures", "steps' pictures")):
                if number := self._dropped[kind]:
                    self._notices.warn(f"logger {self.name}: {number} {lost} were dropped while it was silent")

    def let_go(self) -> None:
        """No longer waits for a backend that has not ended; tells what it lacks, and lets the process end."""
        with self._changed:
            if not self._thread.is_alive() or not self._is_active:
                return
            num_waiting = self._num_waiting("step")
            self._waiting.clear()
            self._is_active = False
        self._notices.warn(
            f"logger {self.name} did not end within {time.monotonic() - self._asked_at:.0f} s and is left behind; "
            f"{num_waiting} steps that waited for it are not in it"
        )
        if self._abandon is not None:
            with contextlib.suppress(Exception):
                self._abandon()

    def _put(self, kind: Literal["step", "pictures", "other"], what: str, action: Callable[[Backend], None]) -> None:
        limits = {"step": self._patience.most_waiting, "pictures": self._patience.most_pictures_waiting}
        with self._changed:
            if not self._is_active:
                return
            if kind in limits and self._num_waiting(kind) >= limits[kind]:
                if kind == "step" and not self._dropped[kind]:
                    self._notices.warn(f"logger {self.name} does not answer: steps are dropped from {what} on")
                self._dropped[kind] += 1
            else:
                self._waiting.append(_Job(kind, what, action))
                self._changed.notify()
            if self._busy is not None and not self._is_silent:
                doing, since = self._busy
                if time.monotonic() - since > self._patience.silence_s:
                    self._is_silent = True
                    self._notices.warn(
                        f"logger {self.name} has not answered for {self._patience.silence_s:g} s ({doing}); training "
                        f"goes on, its steps are kept (up to {self._patience.most_waiting})"
                    )

    def _work(self) -> None:
        """The thread: opens, catches up, does what is queued, closes."""
        doing = "could not start"
        try:
            backend = self._open_backend()
            self._backend = backend
            self._run_id = backend.run_id or self._run_id
            if backend.announcement:
                self._notices.message(backend.announcement)
            self._is_open.set()
            doing = "failed at an earlier step"
            for record in self._earlier_steps():
                if record.step > backend.last_step and self._is_active:
                    self._set_busy(f"step {record.step}")
                    self._write_step(backend, record.step, record.metrics)
            while job := self._next_job():
                doing = f"failed at {job.what}"
                job.action(backend)
            if self._is_active:
                doing = "failed to close"
                self._set_busy("closing")
                backend.close(self._outcome or "finished")
        except BaseException as error:  # a package may even call sys.exit
            self._leave_out(doing, error)
        finally:
            self._is_open.set()

    def _num_waiting(self, kind: str) -> int:
        return sum(job.kind == kind for job in self._waiting)

    def _next_job(self) -> _Job | None:
        with self._changed:
            self._busy = None
            if self._is_silent and self._is_active:
                self._is_silent = False
                self._notices.message(f"logger {self.name} answers again")
            while not self._waiting and self._outcome is None:
                self._changed.wait()
            if not self._waiting or not self._is_active:
                return None
            job = self._waiting.popleft()
            self._busy = (job.what, time.monotonic())
            return job

    def _set_busy(self, what: str) -> None:
        with self._changed:
            self._busy = (what, time.monotonic())

    def _write_config(self, backend: Backend, config: Mapping[str, Any]) -> None:
        try:
            backend.log_config(config)
        except Exception as error:
            # It may mind one value of the configuration, and take every step.
            self._notices.warn(f"logger {self.name} lacks the configuration: {reason_of(error)}")

    def _send_alert(self, backend: Backend, title: str, text: str) -> None:
        if not isinstance(backend, SendsAlerts):
            return
        try:
            backend.send_alert(title, text)
        except Exception as error:
            self._notices.warn(f"logger {self.name} could not send an alert: {reason_of(error)}")

    def _write_step(self, backend: Backend, step: int, metrics: Mapping[str, float]) -> None:
        left_out = {key for key, times in self._refusals.items() if times >= _REFUSALS_BEFORE_A_KEY_IS_LEFT_OUT}
        metrics = {key: value for key, value in metrics.items() if key not in left_out} if left_out else metrics
        try:
            backend.log_step(step, metrics)
        except Exception as error:
            rejected = write_what_is_accepted(lambda part: backend.log_step(step, part), metrics, error)
            if news := sorted(key for key in rejected if key not in self._refusals):
                more = [f"{len(news) - _KEYS_NAMED} more"] if len(news) > _KEYS_NAMED else []
                named = ", ".join(news[:_KEYS_NAMED] + more)
                self._notices.warn(
                    f"logger {self.name} rejects at step {step}: {named} ({reason_of(rejected[news[0]])}); "
                    "the other metrics are logged"
                )
            self._refusals.update(list(rejected))

    def _leave_out(self, failure: str, error: BaseException) -> None:
        with self._changed:
            was_active, self._is_active = self._is_active, False
            self._busy = None
            self._waiting.clear()
        if was_active:
            self._notices.warn(f"logger {self.name} {failure} and is left out from here on: {reason_of(error)}")
        if self._backend is not None and failure != "failed to close":
            # Frees its files and threads; it has had its warning, so a second failure is of no interest.
            with contextlib.suppress(BaseException):
                self._backend.close("failed")
