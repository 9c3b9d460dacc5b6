# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The loggers of a run, as the configuration asks for them."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.runs.loggers.console import ConsoleLogger
from nemo_rl_moe.runs.loggers.factory import build_loggers, find_custom_backends
from tests.support.custom_parts import NAME
from tests.support.loggers import read_jsonl, read_tensorboard, settings_for


def test_only_console_and_jsonl_by_default_and_nothing_heavy_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys; import nemo_rl_moe.runs.loggers.factory\n"
        "print(sorted({'torch', 'ray', 'megatron', 'wandb', 'mlflow', 'tensorboard'} & set(sys.modules)))\n"
    )
    path = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=path, check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"
    loggers = build_loggers(settings_for(tmp_path), tmp_path, ConsoleLogger(1, stream=io.StringIO()))
    assert loggers.active == ("jsonl", "console")
    loggers.close()


def test_a_logger_of_ones_own_gets_the_steps_behind_a_thread_of_its_own(tmp_path: Path) -> None:
    stream = io.StringIO()
    settings = settings_for(tmp_path, backends=[f"{NAME}:LinesLogger", f"{NAME}:raising"])
    with build_loggers(settings, tmp_path, ConsoleLogger(3, stream=stream)) as loggers:
        loggers.log_config({"policy": {}})
        loggers.log_step(1, {"train/loss": 1.0})
    lines = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert lines == [{"sections": ["policy"]}, {"step": 1, "keys": ["train/loss"]}]
    reported = stream.getvalue()
    assert f"warning: logger {NAME}:raising could not start and is not used from here on: KeyError" in reported


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (f"{NAME}:LineLogger", f"{NAME} has no LineLogger; did you mean LinesLogger?"),
        (f"{NAME}:NOT_CALLABLE", "is 3 (int), expected a function"),
        (f"{NAME}:MisspelledLogger", "interface.LoggerBase); did you mean log_steps?"),
        (f"{NAME}:makes_a_number", "cannot be called with the run's folder: too many positional arguments"),
    ],
)
def test_a_logger_of_ones_own_that_is_not_there_is_one_line(tmp_path: Path, name: str, problem: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        find_custom_backends(settings_for(tmp_path, backends=[name]))
    (line,) = error.value.problems
    assert line.startswith(f"logger.backends: {name}")
    assert problem in line


def test_a_logger_named_twice_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"logger.backends: got {NAME}:LinesLogger twice"):
        find_custom_backends(settings_for(tmp_path, backends=[f"{NAME}:LinesLogger"] * 2))


def test_backend_that_cannot_start_warns_once_on_the_console(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    stream = io.StringIO()
    settings = settings_for(tmp_path, "tensorboard", "mlflow", tracking_uri="http://127.0.0.1:9")
    with build_loggers(settings, tmp_path, ConsoleLogger(3, stream=stream)) as loggers:
        assert loggers.active == ("jsonl", "console", "tensorboard")
        for step in (1, 2, 3):
            loggers.log_step(step, {"train/loss": 1.0})
    (warning,) = [line for line in stream.getvalue().splitlines() if line.startswith("warning")]
    assert warning.startswith("warning: logger mlflow could not start and is not used from here on: MlflowException")
    wanted = {"train/loss": [(1, 1.0), (2, 1.0), (3, 1.0)]}
    assert read_jsonl(tmp_path / "metrics.jsonl") == wanted
    assert read_tensorboard(tmp_path / "tensorboard") == wanted
