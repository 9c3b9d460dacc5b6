# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs that end badly: soon, with the right exit code, saying why, and leaving neither processes nor half a run."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from nemo_rl_moe.cli import main
from nemo_rl_moe.loggers.jsonl import read_metrics
from tests.functional import sft_runs

START_LIMIT_S = 200.0
END_LIMIT_S = 30.0
# What Ray and W&B leave to themselves ends a moment after the run.
LAST_PROCESSES_LIMIT_S = 15.0
WORKER_NAME = "ray::WorkerProcess"

Refused = Callable[..., str]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sft_runs.make_additions(tmp_path_factory.mktemp("data"), 256, 16)


@pytest.fixture
def training_run(data: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A run of two workers that would take hours; its own process group goes at the end, whatever happens."""
    overrides = sft_runs.settings(
        tmp_path,
        data,
        sft__max_num_epochs=100_000,
        sft__max_num_steps="null",
        sft__val_period=0,
        logger__mlflow_enabled=False,
    )
    (tmp_path / "work").mkdir()
    with (tmp_path / "errors").open("w") as errors:
        run = subprocess.Popen(
            sft_runs.sft_command(overrides),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=sft_runs.environment(),
            cwd=tmp_path / "work",
            start_new_session=True,
            # A shell's background job ignores the signal, and all that it starts would inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    family: list[psutil.Process] = []
    try:
        yield run
    finally:
        if run.poll() is None:
            family = psutil.Process(run.pid).children(recursive=True)
            run.kill()
            run.wait()
        for process in sft_runs.running(family):
            process.kill()
        assert run.stdout is not None
        run.stdout.close()


def read_until_step(run: subprocess.Popen[str], step: int) -> str:
    """What a run prints up to the line of a step."""
    assert run.stdout is not None
    lines, deadline = [], time.monotonic() + START_LIMIT_S
    for line in run.stdout:
        lines.append(line)
        if line.startswith(f"step {step}/"):
            return "".join(lines)
        assert time.monotonic() < deadline, "".join(lines)
    raise AssertionError("the run ended: " + "".join(lines))


def wait_until_gone(processes: list[psutil.Process], limit_s: float) -> list[psutil.Process]:
    """Those that still run after so many seconds."""
    deadline = time.monotonic() + limit_s
    while (left := sft_runs.running(processes)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def test_a_worker_is_killed_while_it_trains(training_run: subprocess.Popen[str], tmp_path: Path) -> None:
    printed = read_until_step(training_run, 3)
    family = psutil.Process(training_run.pid).children(recursive=True)
    workers = [process for process in family if process.name().startswith(WORKER_NAME[:15])]
    workers = [process for process in workers if process.cmdline()[0].startswith(WORKER_NAME)]
    assert len(workers) == 2
    victim = workers[0]
    os.kill(victim.pid, signal.SIGKILL)
    killed = time.monotonic()
    assert training_run.stdout is not None
    printed += training_run.stdout.read()
    assert training_run.wait(END_LIMIT_S) == 1
    assert time.monotonic() - killed < END_LIMIT_S

    errors = (tmp_path / "errors").read_text()
    assert re.match(rf"error: worker rank \d \(pid {victim.pid}\) died in `train`:", errors), errors
    assert "Worker exit type: SYSTEM_ERROR" in errors
    assert "All 2 workers have been stopped." in errors
    assert "Traceback" not in errors
    assert "steps done" not in printed
    assert [process.cmdline() for process in wait_until_gone(family, LAST_PROCESSES_LIMIT_S)] == []

    run_folder = sft_runs.only_run_folder(tmp_path)
    steps = [record.step for record in read_metrics(run_folder / "metrics.jsonl")]
    assert steps == list(range(len(steps))), "whatever was logged before can be read"
    assert len(steps) > 3
    assert not (run_folder / "checkpoints").exists(), "nothing that looks like a finished model"


def test_interrupted_by_the_user(training_run: subprocess.Popen[str], tmp_path: Path) -> None:
    read_until_step(training_run, 2)
    family = psutil.Process(training_run.pid).children(recursive=True)
    # The terminal sends it to every process of the group.
    os.killpg(training_run.pid, signal.SIGINT)
    assert training_run.wait(END_LIMIT_S) == 130
    assert (tmp_path / "errors").read_text() == "interrupted\n"
    assert [process.cmdline() for process in wait_until_gone(family, LAST_PROCESSES_LIMIT_S)] == []


@pytest.fixture
def refused(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Runs the command, which must end with exit code 2 and leave no trace; returns what it says."""
    for name, value in sft_runs.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.chdir(sft_runs.REPOSITORY_ROOT)

    def run(folder: Path = data, **changes: Any) -> str:
        before = set(tmp_path.rglob("*"))
        overrides = sft_runs.settings(tmp_path, folder, **changes)
        assert main(["sft", "--config", str(sft_runs.EXEMPLAR), *overrides]) == 2
        assert set(tmp_path.rglob("*")) == before, "nothing is written"
        assert not ray.is_initialized()
        errors = capsys.readouterr().err
        assert "Traceback" not in errors
        return errors

    return run


def test_a_bad_line(refused: Refused, data: Path, tmp_path: Path) -> None:
    lines = (data / "train.jsonl").read_text().splitlines()
    lines[41] = '{"prompt": "1+1=", "answer": "2"}'
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    errors = refused(data__train__path=tmp_path / "train.jsonl")
    assert f"{tmp_path / 'train.jsonl'}:42: " in errors
    assert "completion" in errors
    assert errors.startswith("error: ")


def test_too_few_samples(refused: Refused, data: Path, tmp_path: Path) -> None:
    (tmp_path / "few.jsonl").write_text("".join((data / "train.jsonl").read_text().splitlines(keepends=True)[:127]))
    assert refused(data__train__path=tmp_path / "few.jsonl") == (
        "error: policy.train_global_batch_size: got 128, but the training data has only 127 examples that can be used\n"
    )


def test_gpus_on_a_machine_without(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert refused(cluster__gpus_per_node=2) == (
        "error: cluster.gpus_per_node: asked for 2 GPUs on one node, the Ray cluster has 0;"
        " nearest: cluster.gpus_per_node=0, which trains on CPUs\n"
    )


def test_unknown_model_folder(refused: Refused) -> None:
    errors = refused(policy__model_name=sft_runs.MODEL.with_name("tiny_qwen3_mo"))
    assert "error: policy.model_name: " in errors
    assert str(sft_runs.MODEL) in errors, "the nearest one is named"
    assert "policy.tokenizer.name" not in errors, "one mistake, one line"


def test_a_model_without_weights(refused: Refused) -> None:
    assert refused(policy__init="pretrained") == (
        f"error: policy.init: got 'pretrained', but {sft_runs.MODEL} holds no *.safetensors file;"
        " allowed with it: random\n"
    )


def test_a_model_of_another_family(refused: Refused, tmp_path: Path) -> None:
    folder = sft_runs.make_model_folder(tmp_path / "mixtral", model_type="mixtral", num_local_experts=8)
    errors = refused(policy__model_name=folder)
    assert "policy.model_name" in errors
    assert "qwen3_moe" in errors
