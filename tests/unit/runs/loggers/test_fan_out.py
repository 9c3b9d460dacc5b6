# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A failing logger warns once and is left out; the others get every step."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_moe.errors import UserCodeError
from nemo_rl_moe.runs.folder.metrics import JsonlLogger, read_metrics
from nemo_rl_moe.runs.loggers.console import Notices
from nemo_rl_moe.runs.loggers.fan_out import FanOutLogger
from tests.support.clocks_and_disks import files_no_longer_than


class Recorder:
    """Keeps what it is given; fails where it is reported to."""

    def __init__(self, name: str = "x", fail_in: str = "", error: BaseException | None = None):
        self.name = name
        self.calls: list[tuple[Any, ...]] = []
        self._fail_in = fail_in
        self._error = error or OSError("disk is full")

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._note("log_step", step, dict(metrics))

    def log_config(self, config: Mapping[str, Any]) -> None:
        self._note("log_config", dict(config))

    def close(self, outcome: str = "finished") -> None:
        self._note("close", outcome)

    def _note(self, *call: Any) -> None:
        self.calls.append(call)
        if call[0] == self._fail_in:
            raise self._error


def drive(broken_in: str) -> tuple[Recorder, Recorder, list[str]]:
    warnings: list[str] = []
    healthy, broken = Recorder("healthy"), Recorder("broken", broken_in)
    logger = FanOutLogger([broken, healthy], Notices(pytest.fail, warnings.append))
    logger.log_config({"a": 1})
    for step in (1, 2, 3):
        logger.log_step(step, {"train/loss": float(step)})
    logger.close()
    return healthy, broken, warnings


def test_steps_are_on_the_disk_when_every_file_has_them(tmp_path: Path) -> None:
    reported: list[str] = []
    metrics = JsonlLogger(tmp_path, reported.append, reported.append)
    logger = FanOutLogger([metrics, Recorder()], Notices(pytest.fail, pytest.fail))
    logger.log_step(1, {"train/loss": 1.0})
    assert logger.flush_to_disk()
    with files_no_longer_than(10):
        logger.log_step(2, {"train/loss": 1.0})
        assert not logger.flush_to_disk()
    assert logger.flush_to_disk()
    assert [record.step for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]


@pytest.mark.parametrize(
    ("broken_in", "text"),
    [
        ("log_config", "logger broken failed to store the configuration and is not used from here on"),
        ("log_step", "logger broken failed at step 1 and is not used from here on: OSError: disk is full"),
        ("close", "logger broken failed to close and is not used from here on"),
    ],
)
def test_failure_warns_once_and_spares_the_others(broken_in: str, text: str) -> None:
    healthy, broken, warnings = drive(broken_in)
    assert len(warnings) == 1
    assert warnings[0].startswith(text)
    steps = [("log_step", step, {"train/loss": float(step)}) for step in (1, 2, 3)]
    assert healthy.calls == [("log_config", {"a": 1}), *steps, ("close", "finished")]
    if broken_in == "log_step":
        assert [call[0] for call in broken.calls] == ["log_config", "log_step", "close"]


def test_without_failure_nothing_is_said_and_all_get_the_same() -> None:
    healthy, other, warnings = drive("nowhere")
    assert warnings == []
    assert other.calls == healthy.calls


def test_warning_that_cannot_be_shown_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    def closed_pipe(_: str) -> None:
        raise BrokenPipeError

    logger = FanOutLogger([Recorder("console", "log_step")], Notices(closed_pipe, closed_pipe))
    logger.log_step(1, {})
    assert "logger console failed at step 1" in capsys.readouterr().err
    assert logger.active == ()


def test_an_interrupt_is_not_swallowed() -> None:
    logger = FanOutLogger([Recorder("x", "log_step", KeyboardInterrupt())], Notices(print, print))
    with pytest.raises(KeyboardInterrupt):
        logger.log_step(1, {})


@pytest.mark.parametrize(
    ("error", "outcome"), [(RuntimeError("x"), "failed"), (KeyboardInterrupt(), "killed"), (SystemExit(143), "killed")]
)
def test_leaving_the_context_closes_and_reports_how_the_run_ended(error: BaseException, outcome: str) -> None:
    recorder = Recorder()
    with pytest.raises(type(error)), FanOutLogger([recorder], Notices(print, print)):
        raise error
    assert recorder.calls[-1] == ("close", outcome)


@pytest.mark.parametrize("odd", ["much", [1.0, 2.0], None])
def test_a_metric_that_is_no_number_is_an_error_that_names_it(odd: Any) -> None:
    """A run that goes on without it, and ends with 0, would pass for one that measured it."""
    recorder = Recorder()
    logger = FanOutLogger([recorder], Notices(pytest.fail, pytest.fail))
    with pytest.raises(UserCodeError) as error:
        logger.log_step(3, {"train/loss": 1, "train/own": odd})
    expected = f"the metric train/own of step 3 is {odd!r} ({type(odd).__name__}), expected a number"
    assert str(error.value) == expected
    assert recorder.calls == []
