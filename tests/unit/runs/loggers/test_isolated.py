# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Backends that sleep, hang, raise and reject keys: the caller never waits, and is reported once."""

import re
import threading
import time
from collections.abc import Callable

import pytest

from nemo_rl_moe.runs.folder.metrics import StepRecord
from nemo_rl_moe.runs.loggers.console import Notices
from nemo_rl_moe.runs.loggers.isolated import IsolatedLogger, Patience
from tests.support.loggers import ListBackend, log_steps

QUICK = Patience(opening_s=0.2, silence_s=0.1, closing_s=100, most_waiting=3)


class Reported:
    def __init__(self) -> None:
        self.messages: list[str] = []
        self.warnings: list[str] = []
        self.notices = Notices(self.messages.append, self.warnings.append)


@pytest.fixture
def reported() -> Reported:
    return Reported()


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_healthy_backend_gets_everything_in_order(reported: Reported) -> None:
    backend = ListBackend()
    logger = IsolatedLogger("x", backend.open, reported.notices)
    logger.wait_until_open()
    assert logger.run_id == "id-1"
    logger.log_config({"c": 1})
    log_steps(logger, range(1, 50))
    logger.close("killed")
    assert backend.steps == [(step, {"train/loss": float(step)}) for step in range(1, 50)]
    assert (backend.config, backend.outcome) == ({"c": 1}, "killed")
    assert backend.thread is not threading.current_thread()
    assert reported.warnings == reported.messages == []


def test_a_backend_that_blocks_is_reported_once_and_finds_its_steps(reported: Reported, gate: threading.Event) -> None:
    backend = ListBackend(gate)
    logger = IsolatedLogger("x", backend.open, reported.notices, patience=QUICK)
    logger.wait_until_open()
    logger.log_step(1, {})
    eventually(lambda: not logger._waiting)  # the thread has taken it, and hangs
    time.sleep(2 * QUICK.silence_s)
    log_steps(logger, range(2, 5))
    assert reported.warnings == [
        "logger x has not answered for 0.1 s (step 1); training continues, its steps are kept (up to 3)"
    ]
    gate.set()
    logger.close()
    assert [step for step, _ in backend.steps] == [1, 2, 3, 4]
    assert reported.messages == ["logger x answers again"]
    assert len(reported.warnings) == 1


def test_steps_beyond_the_queue_are_dropped_and_counted(reported: Reported, gate: threading.Event) -> None:
    backend = ListBackend(gate)
    logger = IsolatedLogger("x", backend.open, reported.notices, patience=Patience(most_waiting=3, closing_s=100))
    logger.log_step(1, {})
    eventually(lambda: not logger._waiting)  # the thread has taken it, and hangs
    log_steps(logger, range(2, 10))
    gate.set()
    logger.close()
    assert [step for step, _ in backend.steps] == [1, 2, 3, 4]
    assert reported.warnings == [
        "logger x does not answer: steps are dropped from step 5 on",
        "logger x: 5 steps were dropped while it was silent",
    ]


def test_a_backend_that_hangs_at_the_end_is_left_behind(reported: Reported, gate: threading.Event) -> None:
    abandoned = threading.Event()
    patience = Patience(silence_s=9, closing_s=0.2)
    logger = IsolatedLogger("x", ListBackend(gate).open, reported.notices, abandon=abandoned.set, patience=patience)
    log_steps(logger, range(1, 4))
    logger.close()
    assert abandoned.is_set()
    assert not logger.is_active
    (warning,) = reported.warnings
    assert re.match(r"logger x did not end within \d+ s and is abandoned; ", warning)


def test_a_backend_that_uploads_at_the_end_is_waited_for_longer(reported: Reported, gate: threading.Event) -> None:
    backend = ListBackend(gate)
    backend.seconds_to_close = 30.0
    logger = IsolatedLogger("x", backend.open, reported.notices, patience=Patience(closing_s=0.1))
    logger.wait_until_open()
    logger.log_step(1, {})
    threading.Timer(0.4, gate.set).start()
    logger.close()
    assert reported.messages == ["waiting up to 30 s for x to send remaining data (an interrupt ends the wait)"]
    assert backend.outcome == "finished"
    assert reported.warnings == []


def test_a_backend_that_opens_late_gets_all_steps(reported: Reported, gate: threading.Event) -> None:
    backend = ListBackend()

    def open_backend() -> ListBackend:
        gate.wait()
        return backend.open()

    logger = IsolatedLogger("x", open_backend, reported.notices, patience=QUICK, run_id="earlier")
    logger.wait_until_open()
    assert logger.run_id == "earlier"
    log_steps(logger, range(1, 4))
    gate.set()
    logger.close()
    assert [step for step, _ in backend.steps] == [1, 2, 3]
    assert reported.warnings == [
        "logger x did not open within 0.2 s; training starts without it, its steps are kept (up to 3)"
    ]


def test_a_backend_that_fails_three_times_in_a_row_is_left_out(reported: Reported) -> None:
    backend = ListBackend(fails_from=3)
    logger = IsolatedLogger("x", backend.open, reported.notices)
    log_steps(logger, range(1, 6))
    eventually(lambda: not logger.is_active)
    log_steps(logger, range(6, 9))
    logger.close()
    assert reported.warnings == [
        "logger x does not take step 3: OSError: disk is full",
        "logger x failed at step 5 and is not used from here on: OSError: disk is full",
    ]
    assert [step for step, _ in backend.steps] == [1, 2]
    assert backend.outcome == "failed"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("no server"), "RuntimeError: no server"),
        (SystemExit(3), "SystemExit: 3"),
        (ModuleNotFoundError("No module named 'mlflow'", name="mlflow"), "the package mlflow is not installed"),
    ],
)
def test_a_backend_that_cannot_open_is_left_out(reported: Reported, error: BaseException, reason: str) -> None:
    def open_backend() -> ListBackend:
        raise error

    logger = IsolatedLogger("x", open_backend, reported.notices, patience=Patience(reopening_s=(0.01,)))
    logger.wait_until_open()
    assert not logger.is_active
    log_steps(logger, range(1, 4))
    logger.close()
    assert reported.warnings == [f"logger x could not start and is not used from here on: {reason}"]


def test_a_backend_that_opens_at_the_third_attempt_takes_part(reported: Reported) -> None:
    backend, failures = ListBackend(), [OSError("table runs already exists"), OSError("duplicate column name")]

    def open_backend() -> ListBackend:
        if failures:
            raise failures.pop()
        return backend.open()

    logger = IsolatedLogger("x", open_backend, reported.notices, patience=Patience(reopening_s=(0.01, 0.01)))
    log_steps(logger, range(1, 4))
    logger.close()
    assert reported.warnings == []
    assert [step for step, _ in backend.steps] == [1, 2, 3]


def test_a_step_with_a_rejected_key_is_missing_there_and_reported_once(reported: Reported) -> None:
    backend = ListBackend(bad_keys="b")
    logger = IsolatedLogger("x", backend.open, reported.notices)
    for step in range(1, 10):
        logger.log_step(step, dict.fromkeys("abc" if step % 3 else "ac", float(step)))
    logger.close()
    assert backend.steps == [(step, dict.fromkeys("ac", float(step))) for step in (3, 6, 9)]
    assert reported.warnings == ["logger x does not take step 1: ValueError: invalid key ['b']"]
    assert backend.outcome == "finished"


def test_a_resumed_backend_first_gets_the_steps_that_it_lacks(reported: Reported) -> None:
    backend = ListBackend()
    backend.last_step = 2
    earlier = [StepRecord(step, 0.0, {"a": -1.0}) for step in range(1, 5)]
    logger = IsolatedLogger("x", backend.open, reported.notices, earlier_steps=lambda: earlier)
    log_steps(logger, range(5, 7))
    logger.close()
    assert backend.steps == [(3, {"a": -1.0}), (4, {"a": -1.0}), *((step, {"train/loss": step}) for step in (5, 6))]
