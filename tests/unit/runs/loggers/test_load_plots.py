# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Plots on their way to the backends: drawn once, out of the caller's way, and lost before any metric is."""

import threading
import time
from collections.abc import Sequence

import pytest

from nemo_rl_moe.runs.folder.artifacts import EXPERT_LOAD
from nemo_rl_moe.runs.loggers import artifacts
from nemo_rl_moe.runs.loggers.console import Notices
from nemo_rl_moe.runs.loggers.fan_out import FanOutLogger
from nemo_rl_moe.runs.loggers.isolated import IsolatedLogger, Patience
from nemo_rl_moe.runs.loggers.step_plots import StepPlots
from tests.support.loggers import ListBackend, load_of

LOAD = load_of([3, 1], [0, 4])
DRAWING_S = 0.05
PATIENT = Patience(most_plots_waiting=99)
FAILS = "logger x does not take the plots of step {}: OSError: no space; its metrics are still logged"


@pytest.fixture
def warnings() -> list[str]:
    return []


@pytest.fixture
def drawn_in(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """The thread of each drawing; takes a moment for each."""
    threads: list[threading.Thread] = []

    def draw(step: int, layers: object, counts: object) -> dict[str, bytes]:
        threads.append(threading.current_thread())
        time.sleep(DRAWING_S)
        return {"plots/a": b"%d" % step}

    monkeypatch.setattr(artifacts, "expert_load_plots", draw)
    return threads


def fan_out(backends: list[ListBackend], warnings: list[str], every: int | None, patience: Patience) -> FanOutLogger:
    notices = Notices(pytest.fail, warnings.append)
    isolated = [IsolatedLogger("x", backend.open, notices, patience=patience) for backend in backends]
    return FanOutLogger([], notices, isolated, plots=StepPlots(every, notices))


def log(loggers: FanOutLogger, steps: range) -> None:
    for step in steps:
        loggers.log_artifact(step, EXPERT_LOAD.name, LOAD)
        loggers.log_step(step, {"train/loss": 1.0})


def test_each_is_drawn_once_for_all_backends_and_not_by_the_caller(
    warnings: list[str], drawn_in: list[threading.Thread]
) -> None:
    backends = [ListBackend(), ListBackend()]
    loggers = fan_out(backends, warnings, 3, PATIENT)
    log(loggers, range(1, 8))
    loggers.close()
    for backend in backends:
        steps = [("plots", 1), *(("step", i) for i in (1, 2)), ("plots", 3), *(("step", i) for i in (3, 4, 5))]
        assert backend.calls == [*steps, ("plots", 6), ("step", 6), ("step", 7)]
        assert backend.plots == {step: {"plots/a": b"%d" % step} for step in (1, 3, 6)}
    assert len(drawn_in) == 3
    assert threading.current_thread() not in drawn_in
    assert warnings == []


@pytest.mark.parametrize("every", [None, 0])
def test_never_means_never(every: int | None, warnings: list[str], drawn_in: list[threading.Thread]) -> None:
    backend = ListBackend()
    loggers = fan_out([backend], warnings, every, Patience())
    log(loggers, range(1, 60))
    loggers.close()
    assert (backend.asked_for_plots_at, drawn_in) == ([], [])


def test_a_slow_backend_loses_plots_and_no_step(
    warnings: list[str], gate: threading.Event, drawn_in: list[threading.Thread]
) -> None:
    backend = ListBackend(gate)
    loggers = fan_out([backend], warnings, 2, Patience(most_waiting=40))
    log(loggers, range(1, 2))
    while loggers._isolated[0]._waiting:  # the thread hangs at step 1
        time.sleep(0.001)
    log(loggers, range(2, 42))
    gate.set()
    loggers.close()
    assert [step for kind, step in backend.calls if kind == "step"] == list(range(1, 42))
    assert [step for kind, step in backend.calls if kind == "plots"] == [1, 2, 4, 6, 8]
    assert warnings == ["logger x: 16 steps' plots were dropped while it was silent"]


@pytest.mark.parametrize(
    ("no_plots_at", "asked_at", "taken_at"),
    [
        (range(3, 99), [1, 2, 3, 4, 5], [1, 2]),  # after three failures in a row it is not asked again
        ((2, 3, 5, 6), list(range(1, 12)), [1, 4, 7, 8, 9, 10, 11]),
    ],
    ids=["for good", "in passing"],
)
def test_a_backend_that_takes_no_plots_is_reported_once_and_keeps_its_metrics(
    warnings: list[str],
    drawn_in: list[threading.Thread],
    no_plots_at: Sequence[int],
    asked_at: list[int],
    taken_at: list[int],
) -> None:
    backend = ListBackend(no_plots_at=no_plots_at)
    loggers = fan_out([backend], warnings, 1, PATIENT)
    log(loggers, range(1, 12))
    loggers.close()
    assert [step for kind, step in backend.calls if kind == "step"] == list(range(1, 12))
    assert (backend.asked_for_plots_at, sorted(backend.plots)) == (asked_at, taken_at)
    assert len(drawn_in) == len(asked_at)
    assert warnings == [FAILS.format(no_plots_at[0])]


def test_drawing_that_fails_is_reported_once(warnings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(step: int, layers: object, counts: object) -> dict[str, bytes]:
        raise RuntimeError("no fonts")

    monkeypatch.setattr(artifacts, "expert_load_plots", draw)
    backends = [ListBackend(), ListBackend()]
    loggers = fan_out(backends, warnings, 2, PATIENT)
    log(loggers, range(1, 6))
    loggers.close()
    assert warnings == ["the expert load of step 1 cannot be drawn: RuntimeError: no fonts; metrics are still logged"]
    for backend in backends:
        assert backend.calls == [("step", step) for step in range(1, 6)]
