# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Real services that hang, are locked, killed or out of space: no step takes a second, and no line is lost."""

import io
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from nemo_rl_moe.runs.loggers.console import ConsoleLogger
from nemo_rl_moe.runs.loggers.factory import build_loggers, mlflow_tracking_uri
from nemo_rl_moe.runs.loggers.isolated import Patience
from tests.support.clocks_and_disks import files_no_longer_than
from tests.support.loggers import log_steps, read_jsonl, read_mlflow, read_tensorboard, settings_for

STEPS = {"train/loss": [(step, float(step)) for step in range(1, 21)]}
QUICK = Patience(opening_s=1.0, silence_s=0.5, closing_s=1.0)


@pytest.fixture
def silent_server() -> Iterator[str]:
    """The address of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def warnings_in(stream: io.StringIO) -> list[str]:
    return [line for line in stream.getvalue().splitlines() if line.startswith("warning")]


def until(is_so: Callable[[], bool]) -> None:
    """Wait for something that may take long on a busy machine."""
    while not is_so():  # pytest's own limit ends a test that hangs
        time.sleep(0.05)


@pytest.mark.full
def test_mlflow_server_that_never_answers(tmp_path: Path, silent_server: str) -> None:
    import mlflow.tracking  # noqa: F401  # seconds that are not the server's

    stream = io.StringIO()
    settings = settings_for(tmp_path, "mlflow", tracking_uri=silent_server)
    with build_loggers(settings, tmp_path, ConsoleLogger(20, stream=stream), patience=QUICK) as loggers:
        log_steps(loggers, range(1, 21))
    assert warnings_in(stream) == [
        "warning: logger mlflow did not open within 1 s; training starts without it, its steps are kept (up to 1000)",
        "warning: logger mlflow did not end within 1 s and is abandoned; 20 steps in its queue are not logged there",
    ]
    assert read_jsonl(tmp_path / "metrics.jsonl") == STEPS


@pytest.mark.full
def test_mlflow_store_that_another_process_has_locked(tmp_path: Path, empty_mlflow_store: Path) -> None:
    stream = io.StringIO()
    settings = settings_for(tmp_path / "logs", "mlflow")
    shutil.copy(empty_mlflow_store, tmp_path)
    lock = (
        "import sqlite3, sys; connection = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "connection.execute('BEGIN EXCLUSIVE'); print('locked', flush=True); sys.stdin.read()\n"
    )
    patience = Patience(silence_s=0.5)
    with build_loggers(settings, tmp_path, ConsoleLogger(20, stream=stream), patience=patience) as loggers:
        log_steps(loggers, range(1, 2))
        until(lambda: read_mlflow(mlflow_tracking_uri(settings), "e") == {"train/loss": [(1, 1.0)]})
        command = [sys.executable, "-c", lock, str(tmp_path / "mlflow.db")]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdin is not None
            assert other.stdout is not None
            assert other.stdout.readline() == "locked\n"
            for step in range(2, 21):
                log_steps(loggers, [step], pause=0.0 if other.stdin.closed else 0.05)
                if warnings_in(stream) and not other.stdin.closed:
                    other.stdin.close()  # before SQLite gives up, after 5 s
    (warning,) = warnings_in(stream)
    assert warning.startswith("warning: logger mlflow has not answered for 0.5 s (step 2); training continues")
    assert "logger mlflow answers again" in stream.getvalue()
    assert read_jsonl(tmp_path / "metrics.jsonl") == STEPS
    assert read_mlflow(mlflow_tracking_uri(settings), "e") == STEPS


def test_mlflow_lacks_the_step_with_a_key_that_it_rejects(tmp_path: Path, empty_mlflow_store: Path) -> None:
    stream = io.StringIO()
    settings = settings_for(tmp_path / "logs", "mlflow")
    shutil.copy(empty_mlflow_store, tmp_path)
    with build_loggers(settings, tmp_path, ConsoleLogger(3, stream=stream)) as loggers:
        for step in (1, 2, 3):
            loggers.log_step(step, {"train/a": 1.0, "train/b": 2.0} | ({"train/c[0]": 3.0} if step == 2 else {}))
    (warning,) = warnings_in(stream)
    assert warning.startswith("warning: logger mlflow does not take step 2: MlflowException: ")
    assert "train/c[0]" in warning
    assert read_mlflow(mlflow_tracking_uri(settings), "e") == {
        "train/a": [(1, 1.0), (3, 1.0)],
        "train/b": [(1, 2.0), (3, 2.0)],
    }


def wandb_services() -> list[psutil.Process]:
    return [process for process in psutil.Process().children(recursive=True) if "wandb-core" in process.name()]


def test_wandb_service_that_is_killed(tmp_path: Path) -> None:
    stream = io.StringIO()
    settings = settings_for(tmp_path, "wandb")
    with build_loggers(settings, tmp_path, ConsoleLogger(20, stream=stream)) as loggers:
        log_steps(loggers, range(1, 4))
        (service,) = wandb_services()
        service.kill()
        service.wait()
        log_steps(loggers, range(4, 21), pause=0.02)
        assert loggers.active == ("jsonl", "console")
    first, second = warnings_in(stream)
    assert "logger wandb does not take step " in first
    assert " and is not used from here on: ConnectionResetError" in second
    assert read_jsonl(tmp_path / "metrics.jsonl") == STEPS


@pytest.mark.slow
def test_wandb_service_that_hangs_holds_up_neither_steps_nor_the_end_of_the_process(tmp_path: Path) -> None:
    code = """
import sys, time
from pathlib import Path
from nemo_rl_moe.runs.loggers.console import ConsoleLogger
from nemo_rl_moe.runs.loggers.factory import build_loggers
from nemo_rl_moe.runs.loggers.isolated import Patience
from tests.support.loggers import log_steps, settings_for
from tests.unit.runs.loggers.test_misbehaving_services import wandb_services
folder = Path(sys.argv[1])
with build_loggers(settings_for(folder, "wandb"), folder, ConsoleLogger(20), patience=Patience(closing_s=1)) as loggers:
    (service,) = wandb_services()
    service.suspend()
    (folder / "service.pid").write_text(str(service.pid))
    log_steps(loggers, range(1, 21))
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        command = [sys.executable, "-c", code, str(tmp_path)]
        # Files, since the service would keep pipes open.
        with (tmp_path / "out").open("wb") as out, (tmp_path / "errors").open("wb") as errors:
            subprocess.run(command, env=environment, stdout=out, stderr=errors, timeout=250, check=True)
    finally:
        os.kill(int((tmp_path / "service.pid").read_text()), signal.SIGKILL)
    output = (tmp_path / "out").read_text()
    assert "warning: logger wandb did not end within 1 s and is abandoned" in output
    assert "Traceback" not in (tmp_path / "errors").read_text()
    assert read_jsonl(tmp_path / "metrics.jsonl") == STEPS


def test_disk_that_is_full_for_a_while(tmp_path: Path) -> None:
    stream = io.StringIO()
    settings = settings_for(tmp_path, "tensorboard")
    with build_loggers(settings, tmp_path, ConsoleLogger(20, stream=stream)) as loggers:
        log_steps(loggers, range(1, 6))
        while len(read_tensorboard(tmp_path / "tensorboard").get("train/loss", [])) < 5:
            time.sleep(0.01)
        # Both files are longer by now: some of the next record fits.
        with files_no_longer_than(400):
            log_steps(loggers, range(6, 15), pause=0.02)
        log_steps(loggers, range(15, 21))
    assert read_jsonl(tmp_path / "metrics.jsonl") == STEPS
    first, second, third = sorted(warnings_in(stream))
    assert "logger tensorboard does not take step" in first
    assert "logger tensorboard failed at step" in second
    assert "metrics.jsonl cannot be written, its lines are kept" in third
    shown = read_tensorboard(tmp_path / "tensorboard")["train/loss"]
    assert shown == STEPS["train/loss"][: len(shown)], "what was written before is whole"
    assert len(shown) >= 5
