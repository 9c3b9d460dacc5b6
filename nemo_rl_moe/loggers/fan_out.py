# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Sends every step to all loggers, and keeps the training alive when one of them fails."""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from nemo_rl_moe.loggers.alerts import AlertWatch
from nemo_rl_moe.loggers.interface import FlushesToDisk, MetricLogger
from nemo_rl_moe.loggers.isolated import IsolatedLogger
from nemo_rl_moe.loggers.load_pictures import LoadPictures
from nemo_rl_moe.loggers.notices import Notices, reason_of
from nemo_rl_moe.run_folder.metrics import RunOutcome

if TYPE_CHECKING:
    # A logger needs no torch.
    from nemo_rl_moe.moe.load_statistics import ExpertLoad

_CLOSING_S = 10.0


class FanOutLogger:
    """A `MetricLogger` in front of many: one that fails warns once and is left out, and none holds up the caller.

    Keys and values that are no text and no number are left out with a warning; all others go to the loggers as they
    are, NaN and infinities included.

    Args:
        direct: Name to a function that opens a logger which runs in the caller's thread; called at once, in order.
        notices: Where lines for the user wait, shown at each call.
        isolated: Loggers with threads of their own; they are opening already.
        earlier_run_ids: The run's ids at services of earlier attempts.
        closing_s: Seconds that `close` waits for all isolated loggers together.
        pictures: Draws the expert load for the isolated loggers; None: there are no pictures.
        alerts: Watches the steps; None: there are no alerts.
    """

    name = "all loggers"

    def __init__(
        self,
        direct: Mapping[str, Callable[[], MetricLogger]],
        notices: Notices,
        isolated: Sequence[IsolatedLogger] = (),
        *,
        earlier_run_ids: Mapping[str, str] = MappingProxyType({}),
        closing_s: float = _CLOSING_S,
        pictures: LoadPictures | None = None,
        alerts: AlertWatch | None = None,
    ):
        self._notices = notices
        self._closing_s = closing_s
        self._direct: dict[str, MetricLogger] = {}
        self._isolated = list(isolated)
        self._earlier_run_ids = dict(earlier_run_ids)
        self._warned_keys: set[str] = set()
        self._pictures, self._alerts = pictures, alerts
        self._load: tuple[int, Sequence[int], NDArray[np.int64]] | None = None
        for name, open_logger in direct.items():
            try:
                self._direct[name] = open_logger()
            except Exception as error:
                self._report(name, "could not start", error)
        self._notices.show()

    @property
    def active(self) -> tuple[str, ...]:
        """The names of the loggers that still take part."""
        return (*self._direct, *(logger.name for logger in self._isolated if logger.is_active))

    @property
    def run_ids(self) -> dict[str, str]:
        """Logger to the id by which its service finds the run again, for a checkpoint; those known so far."""
        return self._earlier_run_ids | {logger.name: logger.run_id for logger in self._isolated if logger.run_id}

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends one step to every logger that still takes part; the direct ones have it when this returns."""
        numbers = self._numbers(step, metrics)
        self._for_each(f"failed at step {step}", lambda logger: logger.log_step(step, numbers))
        for isolated in self._isolated:
            isolated.log_step(step, numbers)
        self._send_alerts(step, numbers)
        self._notices.show()

    def log_expert_load(self, step: int, load: "ExpertLoad") -> None:
        """Takes the load matrix of a step, before the step itself: its pictures belong into the step's row."""
        counts = np.asarray(load.counts)
        self._load = step, load.layers, counts
        draw = self._pictures.of_step(step, load.layers, counts) if self._pictures is not None else None
        if draw is not None:
            for isolated in self._isolated:
                isolated.log_pictures(step, draw)

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Sends the configuration to every logger that still takes part."""
        self._for_each("failed to store the configuration", lambda logger: logger.log_config(config))
        for isolated in self._isolated:
            isolated.log_config(config)
        self._notices.show()

    def flush_to_disk(self) -> bool:
        """Waits until the disk has every step that was logged, where a logger keeps them in a file of the run.

        May be called from any thread.

        Returns:
            False where a logger holds some back that cannot be written yet.
        """
        keeping = [logger for logger in list(self._direct.values()) if isinstance(logger, FlushesToDisk)]
        return all(logger.flush_to_disk() for logger in keeping)

    def close(self, outcome: RunOutcome = "finished") -> None:
        """Closes every logger, in bounded time; a second call does nothing."""
        isolated, self._isolated = self._isolated, []
        self._earlier_run_ids |= {logger.name: logger.run_id for logger in isolated if logger.run_id}
        for logger in isolated:
            logger.ask_to_close(outcome)
        try:
            deadline = time.monotonic() + self._closing_s
            for logger in isolated:
                logger.wait_until_closed(deadline)
        finally:
            # After an interrupt too, nothing may keep the process from ending.
            for logger in isolated:
                logger.let_go()
            self._for_each("failed to close", lambda direct: direct.close(outcome))
            self._direct.clear()
            self._notices.show()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close("finished" if error is None else "failed" if isinstance(error, Exception) else "killed")

    def _send_alerts(self, step: int, numbers: Mapping[str, float]) -> None:
        if self._alerts is None:
            return
        layers, counts = self._load[1:] if self._load is not None and self._load[0] == step else ((), None)
        try:
            alerts = self._alerts.observe(step, numbers, layers, counts)
        except Exception as error:
            self._alerts = None
            self._notices.warn(f"no more alerts: the findings of step {step} failed: {reason_of(error)}")
            return
        for alert in alerts:
            self._notices.warn(alert.line)
            for isolated in self._isolated:
                isolated.send_alert(alert.title, alert.text)

    def _numbers(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """A copy in plain floats, which no later change by the caller reaches."""
        numbers: dict[str, float] = {}
        for key, value in metrics.items():
            try:
                if not isinstance(key, str):
                    raise TypeError("a key has to be text")
                key.encode()
                numbers[key] = float(value)
            except Exception as error:
                if repr(key) not in self._warned_keys:
                    self._warned_keys.add(repr(key))
                    self._notices.warn(f"metric {key!r} cannot be logged at step {step}: {reason_of(error)}")
        return numbers

    def _for_each(self, failure: str, action: Callable[[MetricLogger], None]) -> None:
        for name, logger in list(self._direct.items()):
            try:
                action(logger)
            except Exception as error:
                del self._direct[name]
                self._report(name, failure, error)
                # Frees its files; it has had its warning, so a second failure is of no interest.
                with contextlib.suppress(Exception):
                    logger.close()

    def _report(self, name: str, failure: str, error: Exception) -> None:
        self._notices.warn(f"logger {name} {failure} and is left out from here on: {reason_of(error)}")
