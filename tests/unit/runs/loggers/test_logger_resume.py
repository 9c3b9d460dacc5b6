# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Attempts of one run, killed and resumed: every backend ends with each step once."""

import io
import json
import os
import shutil
import subprocess
import sys
import time
from io import BytesIO
from pathlib import Path

import PIL.Image
import pytest

from nemo_rl_moe.runs.folder.metrics import JsonlLogger
from nemo_rl_moe.runs.loggers.console import ConsoleLogger
from nemo_rl_moe.runs.loggers.factory import LoggerResume, build_loggers, mlflow_tracking_uri
from nemo_rl_moe.runs.loggers.mlflow import MlflowLogger, local_store_uri
from nemo_rl_moe.runs.loggers.rewind import rewind_run_folder
from nemo_rl_moe.runs.loggers.tensorboard import TensorBoardLogger
from nemo_rl_moe.runs.loggers.wandb import WandbLogger
from tests.support.loggers import (
    MetricHistory,
    log_steps,
    read_jsonl,
    read_mlflow,
    read_tensorboard,
    read_wandb_offline,
    settings_for,
)
from tests.unit.runs.loggers.resumed_run import metrics_of


def run_attempt(run_folder: Path, attempt: int, first: int, last: int, end: str) -> int:
    arguments = [str(run_folder), *map(str, (attempt, first, last)), end]
    temporary = temporary_of(run_folder)
    temporary.mkdir(exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(temporary)}
    command = [sys.executable, "-m", "tests.unit.runs.loggers.resumed_run", *arguments]
    # No pipes: W&B's service lives on for a moment after a kill and would keep them open.
    return subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False).returncode


def temporary_of(run_folder: Path) -> Path:
    """The folder for temporary files of a run's attempts."""
    return run_folder.parent / "temporary"


def history_of(attempts: dict[int, int]) -> MetricHistory:
    """All metrics, from each step and the attempt that logged it."""
    history: MetricHistory = {}
    for step, attempt in attempts.items():
        for key, value in metrics_of(step, attempt).items():
            history.setdefault(key, []).append((step, value))
    return history


@pytest.mark.slow
def test_every_backend_holds_each_step_once_after_two_kills(run_folder: Path) -> None:
    assert run_attempt(run_folder, 1, 1, 7, "kill") == -9
    assert run_attempt(run_folder, 2, 5, 8, "kill at once") == -9, "what waits in the queues is lost with the process"
    ids = json.loads((run_folder / "ids.json").read_text())
    assert ids.keys() == {"wandb", "mlflow"}

    rewind_run_folder(run_folder, 7)
    settings = settings_for(run_folder.parent, "tensorboard", "wandb", "mlflow")
    stream = io.StringIO()
    console = ConsoleLogger(10, stream=stream)
    with build_loggers(settings, run_folder, console, LoggerResume(7, ids)) as loggers:
        assert loggers.run_ids == ids
        loggers.log_config({"attempt": 3})
        for step in (8, 9, 10):
            loggers.log_step(step, metrics_of(step, 3))
    assert "warning" not in stream.getvalue()

    wanted = history_of({step: 1 if step < 5 else 2 if step < 8 else 3 for step in range(1, 11)})
    assert read_jsonl(run_folder / "metrics.jsonl") == wanted
    by_tensorboard = read_tensorboard(run_folder / "tensorboard")
    by_wandb = read_wandb_offline(run_folder / "wandb")
    by_mlflow = read_mlflow(mlflow_tracking_uri(settings), "e")
    for history in (by_tensorboard, by_wandb, by_mlflow):
        # What was lost with the queues is the only doubt: a step of the second attempt may still be the first one's.
        attempts = history.pop("train/attempt")
        assert [step for step, _ in attempts] == list(range(1, 11))
        assert [attempt for step, attempt in attempts if step < 5 or step > 7] == [1, 1, 1, 1, 3, 3, 3]
        assert history == {key: points for key, points in wanted.items() if key != "train/attempt"}


@pytest.mark.slow
def test_temporary_folders_of_wandb_lie_in_the_run_and_go_with_the_next_attempt(run_folder: Path) -> None:
    assert run_attempt(run_folder, 1, 1, 3, "kill") == -9
    left = {path.name for path in run_folder.glob("wandb/tmp*")}
    assert len(left) == 2, "W&B makes them as before"
    assert run_attempt(run_folder, 2, 2, 4, "close") == 0
    assert not list(run_folder.glob("wandb/tmp*"))
    # Its monitor's process writes a file with its port, and removes it at once: a kill between the two leaves that.
    outside = [path.name for path in temporary_of(run_folder).glob("*wandb*") if "portfile" not in path.name]
    assert outside == [], "nothing outside"


def test_an_attempt_without_a_checkpoint_goes_on_in_the_runs_of_the_one_before(run_folder: Path) -> None:
    settings = settings_for(run_folder.parent, "tensorboard", "mlflow")
    with build_loggers(settings, run_folder, ConsoleLogger(5, stream=io.StringIO())) as first:
        log_steps(first, range(1, 4))
    rewind_run_folder(run_folder, -1)
    resume = LoggerResume(-1, {})
    with build_loggers(settings, run_folder, ConsoleLogger(5, stream=io.StringIO()), resume) as second:
        assert second.run_ids == first.run_ids
        log_steps(second, range(1, 6))
    wanted = {"train/loss": [(step, float(step)) for step in range(1, 6)]}
    assert read_jsonl(run_folder / "metrics.jsonl") == wanted
    assert read_tensorboard(run_folder / "tensorboard") == wanted
    assert read_mlflow(mlflow_tracking_uri(settings), "e") == wanted


def test_later_files_of_a_wandb_run_replace_the_steps_from_their_first_one_on(tmp_path: Path) -> None:
    for attempt, steps in ((1, range(1, 9)), (2, range(5, 8))):
        logger = WandbLogger(tmp_path, "p", None, "id-z", is_resumed=attempt == 2)
        began = int(time.time())
        assert logger.last_step == (8 if attempt == 2 else -1)
        for step in steps:
            logger.log_step(step, {"train/attempt": float(attempt)})
        logger.close("failed")
        while int(time.time()) == began:  # W&B distinguishes attempts by the second in which they begin
            time.sleep(0.02)
    attempts = [1, 1, 1, 1, 2, 2, 2]
    assert read_wandb_offline(tmp_path / "wandb") == {"train/attempt": [(i, a) for i, a in enumerate(attempts, 1)]}
    for run_id, last_step in (("id-z", 7), ("another", -1)):
        third = WandbLogger(tmp_path, "p", None, run_id, is_resumed=True)
        assert third.last_step == last_step
        third.close()


def test_tensorboard_itself_forgets_the_steps_after_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for attempt, (resumed_after, steps) in enumerate([(None, range(8)), (4, range(5, 7)), (5, range(6, 9))]):
        # TensorBoard reads files in the order of the time in their names, and a clock may be set back.
        monkeypatch.setattr(time, "time", lambda now=2e9 - 1000 * attempt: now)
        logger = TensorBoardLogger(tmp_path, resumed_after)
        logger.log_config({"attempt": attempt})
        for step in steps:
            logger.log_step(step, {"train/attempt": float(attempt)})
        logger.close()
    attempts = [0, 0, 0, 0, 0, 1, 2, 2, 2]
    assert read_tensorboard(tmp_path / "tensorboard") == {"train/attempt": list(enumerate(attempts))}


@pytest.mark.parametrize(("resumed_after", "last_step"), [(7, 3), (4, 3), (2, 2), (-1, -1)])
def test_tensorboard_knows_what_it_would_show(resumed_after: int, last_step: int, tmp_path: Path) -> None:
    for after, steps in ((None, range(8)), (1, range(2, 4))):
        logger = TensorBoardLogger(tmp_path, after)
        for step in steps:
            logger.log_step(step, {"train/loss": 1.0})
        logger.close()
    assert TensorBoardLogger(tmp_path, resumed_after).last_step == last_step


def test_a_step_of_which_tensorboard_has_the_plot_alone_is_sent_again(tmp_path: Path) -> None:
    """A kill leaves it so between the plots and the metrics, which `metrics.jsonl` has before both."""
    png = BytesIO()
    PIL.Image.new("RGB", (2, 2)).save(png, "png")
    backend, lines = TensorBoardLogger(tmp_path), JsonlLogger(tmp_path, pytest.fail, pytest.fail)
    log_steps(lines, (1, 2))
    log_steps(backend, (1,))
    backend.log_plots(2, {"plots/a": png.getvalue()})
    for logger in (lines, backend):
        logger.close()
    console = ConsoleLogger(3, stream=io.StringIO())
    with build_loggers(settings_for(tmp_path, "tensorboard"), tmp_path, console, LoggerResume(2, {})) as loggers:
        log_steps(loggers, (3,))
    assert read_tensorboard(tmp_path / "tensorboard") == {"train/loss": [(1, 1.0), (2, 2.0), (3, 3.0)]}


def test_a_torn_event_is_passed_over(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    for step in range(8):
        logger.log_step(step, {"train/loss": float(step)})
    logger.close()
    (path,) = (tmp_path / "tensorboard").iterdir()
    path.write_bytes(path.read_bytes()[:-5])
    second = TensorBoardLogger(tmp_path, 7)
    assert second.last_step == 6
    second.log_step(7, {"train/loss": 7.0})
    second.close()
    wanted = [(step, float(step)) for step in range(8)]
    assert read_tensorboard(tmp_path / "tensorboard") == {"train/loss": wanted}


def test_mlflow_reports_how_the_run_ended_and_that_it_goes_on(tmp_path: Path, empty_mlflow_store: Path) -> None:
    from mlflow.tracking import MlflowClient

    shutil.copy(empty_mlflow_store, tmp_path)
    uri = local_store_uri(tmp_path)
    client = MlflowClient(uri)
    first = MlflowLogger(uri, "e", "n")
    first.log_config({"a": 1, "b": 2})
    first.log_step(1, {"x": 1.0, "y": 1.0})
    first.log_step(2, {"x": 2.0})
    first.close("failed")
    assert client.get_run(first.run_id).info.status == "FAILED"
    second = MlflowLogger(uri, "e", "n", first.run_id)
    assert (second.run_id, second.last_step) == (first.run_id, 1)
    assert client.get_run(first.run_id).info.status == "RUNNING"
    second.log_config({"a": 9, "b": 2, "c": 3})
    second.log_step(2, {"x": 9.0, "y": 9.0})
    second.close()
    run = client.get_run(first.run_id)
    assert (run.info.status, run.data.params) == ("FINISHED", {"a": "1", "b": "2", "c": "3"})
    assert read_mlflow(uri, "e") == {"x": [(1, 1.0), (2, 2.0)], "y": [(1, 1.0), (2, 9.0)]}
    replaced = MlflowLogger(uri, "e", "n", "0" * 32)
    assert replaced.run_id != first.run_id
    assert replaced.last_step == -1


def test_the_time_left_after_a_resume_counts_the_new_steps_alone() -> None:
    now = [0.0]
    stream = io.StringIO()
    console = ConsoleLogger(0, "never", stream, lambda: now[0])
    console.begin(100)
    for step in (51, 52):
        now[0] += 10
        console.log_step(step, {"train/loss": 1.0})
    assert stream.getvalue().splitlines()[-1] == "step 52/100  loss 1.0000  eta 8:00"
