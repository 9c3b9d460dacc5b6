# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs that end badly: soon, with the right exit code, saying why, and leaving neither processes nor half a run."""

import json
import os
import re
import signal
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from nemo_rl_moe.checkpoints.store import CheckpointStore
from nemo_rl_moe.cli import main
from nemo_rl_moe.distributed.node_tools import ray_folder
from nemo_rl_moe.runs.folder.metrics import read_metrics
from tests.functional import run_kills, sft_runs
from tests.support.saving_runs import Run as SavedRun

START_LIMIT_S = 400.0
END_LIMIT_S = 200.0
CALL_LIMIT_S = 15.0

Refused = Callable[..., str]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sft_runs.make_additions(tmp_path_factory.mktemp("data"), 256, 16)


@pytest.fixture
def training_run(request: pytest.FixtureRequest, data: Path, tmp_path: Path) -> Iterator[run_kills.Run]:
    """A run of two workers that would take hours; a parameter is a dictionary of changes."""
    changes: dict[str, Any] = {
        **getattr(request, "param", {}),
        **sft_runs.only_jsonl(),
        "sft__max_num_epochs": 100_000,
        "sft__max_num_steps": "null",
        "sft__val_period": 0,
        "checkpointing__save_period": 0,
    }
    command = sft_runs.sft_command(sft_runs.settings(tmp_path, data, **changes))
    with run_kills.running(command, tmp_path / "work") as run:
        yield run


def logged_steps(folder: Path) -> list[int]:
    return [record.step for record in read_metrics(sft_runs.only_run_folder(folder) / "metrics.jsonl")]


@pytest.mark.full
def test_a_worker_is_killed_while_it_trains(training_run: run_kills.Run, tmp_path: Path) -> None:
    training_run.wait_for_text("step 3/", START_LIMIT_S)
    victim, _ = training_run.find("worker")
    os.kill(victim.pid, signal.SIGKILL)
    assert training_run.wait_for_end(END_LIMIT_S) == 1
    training_run.wait_until_nothing_runs(0.0)

    errors = training_run.errors
    assert re.match(rf"error: worker rank \d \(pid {victim.pid}\) died in `train`:", errors), errors
    assert "Worker exit type: SYSTEM_ERROR" in errors
    assert "All 2 workers have been stopped." in errors
    assert "main process" not in errors, "it is reported once"
    assert "Traceback" not in errors
    assert "steps done" not in training_run.printed
    assert "(raylet)" not in training_run.printed, "Ray's own pages about it say no more"
    steps = logged_steps(tmp_path)
    assert steps == list(range(len(steps))), "whatever was logged before can be read"
    assert len(steps) > 3
    checkpoints = sft_runs.only_run_folder(tmp_path) / "checkpoints"
    assert not list(checkpoints.glob("[!.]*")), "nothing that looks like a model"


@pytest.mark.slow
@pytest.mark.parametrize("training_run", [{"cluster__worker_call_timeout_s": CALL_LIMIT_S}], indirect=True)
def test_a_worker_is_frozen_while_it_trains(training_run: run_kills.Run) -> None:
    training_run.wait_for_text("step 2/", START_LIMIT_S)
    victim, _ = training_run.find("worker")
    victim.suspend()
    assert training_run.wait_for_end(CALL_LIMIT_S + END_LIMIT_S) == 1
    training_run.wait_until_nothing_runs(0.0)
    errors = training_run.errors
    assert re.match(
        rf"error: worker rank \d \(pid {victim.pid}\): its process has been stopped \(SIGSTOP\);"
        rf" it did not answer `train` within {CALL_LIMIT_S:g} s \(cluster\.worker_call_timeout_s\)\n"
        r"Still waiting then: rank \d ",
        errors,
    ), errors
    assert "All 2 workers have been stopped." in errors
    assert "Traceback" not in errors


@pytest.mark.slow
@pytest.mark.parametrize("server", ["raylet", "gcs_server"])
def test_a_server_of_ray_is_killed(training_run: run_kills.Run, server: str) -> None:
    training_run.wait_for_text("step 2/", START_LIMIT_S)
    (victim,) = training_run.find(server)
    os.kill(victim.pid, signal.SIGKILL)
    assert training_run.wait_for_end(END_LIMIT_S) == 1
    training_run.wait_until_nothing_runs(END_LIMIT_S)
    by_watch = rf"^error: Ray's {server} \(pid {victim.pid}\) on this machine has died"
    by_ray = r"^error: the run's main process \(pid \d+\) ended before it could say why"
    assert re.search(f"{by_watch}|{by_ray}", training_run.errors, re.MULTILINE), training_run.errors
    assert "Traceback" not in training_run.errors


@pytest.mark.full
def test_the_process_itself_is_killed(training_run: run_kills.Run) -> None:
    training_run.wait_for_text("step 2/", START_LIMIT_S)
    folders = [path for process in training_run.family() if (path := ray_folder(process.pid)).exists()]
    assert folders
    (driver,), (watcher,) = training_run.find("driver"), training_run.find("watcher")
    assert (driver.pid, watcher.ppid()) == (training_run.process.pid, training_run.process.pid)
    frozen, _ = training_run.find("worker")
    frozen.suspend()
    os.kill(driver.pid, signal.SIGKILL)
    assert training_run.wait_for_end(END_LIMIT_S) == -signal.SIGKILL
    training_run.wait_until_nothing_runs(END_LIMIT_S)
    assert not any(path.exists() for path in folders)
    assert re.fullmatch(
        rf"error: the run's main process \(pid {driver.pid}\) ended before it could say why: .*\n", training_run.errors
    ), training_run.errors


@pytest.mark.slow
def test_the_terminal_is_closed(training_run: run_kills.Run) -> None:
    training_run.wait_for_text("step 2/", START_LIMIT_S)
    os.killpg(training_run.process.pid, signal.SIGHUP)
    assert training_run.wait_for_end(END_LIMIT_S) == 0, training_run.errors
    training_run.wait_until_nothing_runs(0.0)
    assert training_run.errors.strip().startswith("SIGHUP: the run stops after this step"), training_run.errors


@pytest.mark.slow
@pytest.mark.parametrize("training_run", [{"cluster__max_restarts": 1}], indirect=True)
def test_a_supervised_run_starts_again_and_ends_with_its_supervisor(training_run: run_kills.Run) -> None:
    training_run.wait_for_text("step 2/", START_LIMIT_S)
    (driver,) = training_run.find("driver")
    os.kill(driver.pid, signal.SIGKILL)
    training_run.wait_for(lambda: training_run.printed.count("step 2/") == 2, START_LIMIT_S)
    assert "restart 1 of 1: the run's main process was killed by SIGKILL" in training_run.errors
    (supervisor,) = training_run.find("supervisor")
    training_run.family()
    os.kill(supervisor.pid, signal.SIGKILL)
    assert training_run.wait_for_end(END_LIMIT_S) == -signal.SIGKILL
    training_run.wait_until_nothing_runs(END_LIMIT_S)


@pytest.mark.slow
def test_asked_to_stop_by_a_batch_system(training_run: run_kills.Run, tmp_path: Path) -> None:
    training_run.wait_for_text("step 2/", START_LIMIT_S)
    own = [path for process in training_run.family() if (path := ray_folder(process.pid)).exists()]
    assert [stat.S_IMODE(path.stat().st_mode) for path in own] == [0o700]
    listening = training_run.listening()
    assert {name for _, name in listening} >= {"raylet", "gcs_server"}
    assert {address for address, _ in listening} <= run_kills.LOOPBACK, listening
    for process in training_run.family():  # all of them are signalled, Ray and the workers too
        process.send_signal(signal.SIGTERM)
    assert training_run.wait_for_end(END_LIMIT_S) == 0, training_run.errors
    training_run.wait_until_nothing_runs(0.0)
    last = logged_steps(tmp_path)[-1]
    assert training_run.errors.strip().startswith("SIGTERM: the run stops after this step"), "nothing of Ray's"
    saved = sft_runs.only_run_folder(tmp_path) / f"checkpoints/step_{last}"
    assert saved.is_dir()
    assert str(saved) in training_run.printed, "how to go on"
    assert not any(path.exists() for path in own)


@pytest.mark.slow
def test_interrupted_twice_by_the_user(training_run: run_kills.Run) -> None:
    training_run.wait_for_text("step 2/", START_LIMIT_S)
    # Workers that do not answer: no step ends, so that the first request has no effect.
    for worker in training_run.find("worker"):
        worker.suspend()
    os.killpg(training_run.process.pid, signal.SIGINT)  # as the terminal sends it
    time.sleep(1.2)
    assert training_run.process.poll() is None
    os.killpg(training_run.process.pid, signal.SIGINT)
    assert training_run.wait_for_end(END_LIMIT_S) == 130
    training_run.wait_until_nothing_runs(END_LIMIT_S)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "reported"),
    [(signal.SIGINT, 130, "interrupted\n"), (signal.SIGTERM, 143, "terminated\n")],
    ids=["SIGINT", "SIGTERM"],
)
def test_stopped_while_it_starts(training_run: run_kills.Run, number: signal.Signals, code: int, reported: str) -> None:
    training_run.wait_for_text("starting 2 workers", START_LIMIT_S)
    os.killpg(training_run.process.pid, number)
    assert training_run.wait_for_end(END_LIMIT_S) == code
    training_run.wait_until_nothing_runs(0.0)
    assert training_run.errors == reported


@pytest.mark.slow
def test_numbers_that_are_no_longer_numbers_end_the_run(data: Path, tmp_path: Path) -> None:
    """Each update makes weights a hundred times as large; from the first that ruins them no other is applied."""
    changes: dict[str, Any] = {
        **sft_runs.only_jsonl(),
        "sft__max_num_epochs": 100,
        "sft__val_period": 0,
        "sft__val_at_start": False,
        "checkpointing__save_period": 1,
        "checkpointing__metric_name": None,
        "policy__max_consecutive_skipped_updates": 3,
        "policy__megatron_cfg__optimizer__lr": 10,
        "policy__megatron_cfg__optimizer__weight_decay": 10,
        "policy__megatron_cfg__scheduler__lr_warmup_iters": 0,
        "cluster__max_restarts": 2,
    }
    with run_kills.running(
        sft_runs.sft_command(sft_runs.settings(tmp_path, data, **changes)), tmp_path / "work"
    ) as run:
        assert run.wait_for_end(START_LIMIT_S) == 3, run.printed + run.errors
        run.wait_until_nothing_runs(END_LIMIT_S)
    last = logged_steps(tmp_path)[-1]
    run_folder = sft_runs.only_run_folder(tmp_path)
    assert f"error: step {last}: 3 updates in a row were skipped" in run.errors
    assert f"The last good checkpoint: {run_folder / 'checkpoints' / f'step_{last - 3}'}" in run.errors
    assert "restart" not in run.errors, "it would only happen again"
    samples = json.loads((run_folder / "diverged_samples.json").read_text())["sample_ids"]
    assert len(samples) == 128
    assert samples[0] in run.errors
    skipped = [record.metrics["train/skipped_updates"] for record in read_metrics(run_folder / "metrics.jsonl")]
    assert skipped[-3:] == [1.0, 1.0, 1.0]
    assert sum(skipped) == 3


@pytest.mark.slow
def test_a_time_limit(data: Path, tmp_path: Path) -> None:
    """Counted from the command on: the run has hardly started when it has to end, and it saves."""
    changes: dict[str, Any] = {
        **sft_runs.only_jsonl(),
        "sft__max_num_epochs": 100_000,
        "sft__max_num_steps": "null",
        "checkpointing__save_period": 0,
        "checkpointing__checkpoint_must_save_by": '"00:00:00:03"',
    }
    command = sft_runs.sft_command(sft_runs.settings(tmp_path, data, **changes))
    for step in (1, 2):
        with run_kills.running(command, tmp_path / f"work_{step}") as run:
            assert run.wait_for_end(START_LIMIT_S) == 0, run.printed + run.errors
        assert f"stopped after step {step} of" in run.printed, "each of them does the one step that it has to"
        assert "(checkpointing.checkpoint_must_save_by); saved to" in run.printed
    assert logged_steps(tmp_path) == [0, 1, 2]


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


@pytest.fixture
def bad_data(data: Path, tmp_path: Path) -> Path:
    """Data that would end the run if they were read."""
    path = tmp_path / "train.jsonl"
    path.write_text("{}\n" + (data / "train.jsonl").read_text())
    return path


def test_a_folder_of_checkpoints_in_use_is_reported_before_data_are_read(
    refused: Refused, bad_data: Path, tmp_path: Path
) -> None:
    """The other run has only just started; where this one would write its log is not made either."""
    folder = tmp_path / "checkpoints"
    with CheckpointStore(folder).locked():
        errors = refused(data__train__path=bad_data, checkpointing__checkpoint_dir=folder)
    assert errors == (
        f"error: checkpointing.checkpoint_dir: another run is writing to '{folder}'; wait for it to end, or set"
        " another folder (if the key is null, set checkpointing.resume=never, which begins a new folder)\n"
    )


def test_damaged_and_foreign_checkpoints_are_reported_before_data_are_read(
    refused: Refused, bad_data: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    saved = SavedRun(tmp_path / "other", f"checkpointing.checkpoint_dir={folder}", algorithm="dpo")
    saved.save(10)
    (folder / ".lock").touch()
    changes = {"data__train__path": bad_data, "checkpointing__checkpoint_dir": folder}
    assert refused(**changes).startswith(f"error: {folder}/step_10: a checkpoint of dpo, and this run is sft; set ")
    (folder / "step_10" / "state.json").write_text("{}")
    assert refused(**changes).startswith(f"error: {folder}: none of the checkpoints there can be used; set ")


def test_a_log_folder_that_cannot_be_made(refused: Refused, bad_data: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert refused(data__train__path=bad_data, logger__log_dir=tmp_path / "file" / "logs") == (
        f"error: logger.log_dir: got {tmp_path}/file/logs, and {tmp_path}/file is no folder; expected a folder that you"
        " may write to\n"
    )


@pytest.mark.slow
def test_of_two_starts_of_one_command_one_runs(data: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        **sft_runs.only_jsonl(),
        "checkpointing__checkpoint_dir": tmp_path / "checkpoints",
        "sft__max_num_steps": 1,
        "sft__val_at_start": False,
    }
    command = sft_runs.sft_command(sft_runs.settings(tmp_path, data, **changes))
    with run_kills.running(command, tmp_path / "a") as one, run_kills.running(command, tmp_path / "b") as other:
        codes = {run.wait_for_end(START_LIMIT_S): run for run in (one, other)}
    assert sorted(codes) == [0, 2], one.errors + other.errors
    assert "another run is writing to" in codes[2].errors
    assert len(codes[2].errors.splitlines()) == 1
    assert "reading" not in codes[2].printed
    assert sft_runs.only_run_folder(tmp_path).name == "exp_001"


@pytest.mark.full
def test_too_few_samples(refused: Refused, data: Path, tmp_path: Path) -> None:
    (tmp_path / "few.jsonl").write_text("".join((data / "train.jsonl").read_text().splitlines(keepends=True)[:127]))
    assert refused(data__train__path=tmp_path / "few.jsonl") == (
        "error: policy.train_global_batch_size: got 128, but the training data has only 127 examples that can be used\n"
    )


@pytest.mark.slow
def test_gpus_on_a_machine_without(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert refused(cluster__gpus_per_node=2) == (
        "error: cluster.gpus_per_node: asked for 2 GPUs on one node, the Ray cluster has 0;"
        " nearest: cluster.gpus_per_node=0, which trains on CPUs, with parallel sizes of policy.megatron_cfg, such as"
        " expert_model_parallel_size, that divide cluster.cpu_workers_per_node\n"
    )


def test_unknown_model_folder(refused: Refused) -> None:
    errors = refused(policy__model_name=sft_runs.MODEL.with_name("tiny_qwen3_mo"))
    assert "error: policy.model_name: " in errors
    assert str(sft_runs.MODEL) in errors, "the nearest one is named"
    assert "policy.tokenizer.name" not in errors, "one mistake, one line"


def test_a_model_without_weights(refused: Refused) -> None:
    assert refused(policy__init="pretrained") == (
        f"error: policy.model_name: {sft_runs.MODEL}: holds no *.safetensors file; policy.init: random starts without"
        " weights\n"
    )


def test_a_model_of_another_family(refused: Refused, tmp_path: Path) -> None:
    folder = sft_runs.make_model_folder(tmp_path / "gpt2", model_type="gpt2")
    errors = refused(policy__model_name=folder)
    assert "policy.model_name" in errors
    assert "qwen3_moe" in errors
