# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from nemo_rl_moe import __version__, cli, training_cli
from nemo_rl_moe.config import loading
from nemo_rl_moe.config.loading import dump_resolved, load_config
from nemo_rl_moe.errors import EXIT_FAILURE_TOLD, DataError, TrainingDivergedError, WorkerDiedError
from nemo_rl_moe.launch import supervisor
from nemo_rl_moe.launch.driver_process import RunLaunch
from nemo_rl_moe.launch.supervisor import Supervision

REPOSITORY = Path(__file__).resolve().parents[2]
DRIVER = ["sft", "--config", "sft_tiny_moe.yaml", "--run-id", "7b", "--restart-number", "0"]
"""The command as the supervisor gives it to the process that runs it."""


def run_script(arguments: list[str], folder: Path) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, str(REPOSITORY / "examples" / "run_sft.py"), *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250)


def test_wrong_configuration_ends_with_code_2_and_nothing_written(tmp_path: Path) -> None:
    result = run_script(
        ["--config", "sft_tiny_moe.yaml", "sft.max_num_steps=ten", "policy.megatron_cfg.track_moe_metric=true"],
        tmp_path,
    )
    assert result.returncode == 2
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert lines[:2] == [
        "error: policy.megatron_cfg.track_moe_metric: unknown key; did you mean policy.megatron_cfg.track_moe_metrics?",
        "error: sft.max_num_steps: got 'ten' (str), expected a whole number above 0 or null",
    ]
    assert [line.split(":")[1].strip() for line in lines[2:]] == ["data.train.path", "data.validation.path"]
    assert list(tmp_path.iterdir()) == []


def test_config_prints_what_loads_to_the_same(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["config", "--config", "sft_tiny_moe.yaml", "sft.seed=7"]) == 0
    printed = capsys.readouterr().out
    expected = load_config("sft_tiny_moe.yaml", ["sft.seed=7"], check_paths=False)
    assert yaml.safe_load(printed)["sft"]["seed"] == 7
    (tmp_path / "printed.yaml").write_text(printed)
    assert load_config("printed.yaml", check_paths=False) == expected
    # No such folder is here: that of the package.
    assert dump_resolved(expected)["policy"]["tokenizer"]["name"] == str(REPOSITORY / "examples/assets/tiny_qwen3_moe")


def test_overrides_may_stand_before_and_behind_the_config(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["config", "sft.seed=7", "--config=sft_tiny_moe.yaml", "sft.max_num_steps=30", "+sft.seed=8"]
    assert cli.main(arguments) == 0
    sft = yaml.safe_load(capsys.readouterr().out)["sft"]
    assert (sft["seed"], sft["max_num_steps"]) == (8, 30)


def test_missing_config_names_the_shipped_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sft", "sft.seed=1"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: sft: --config FILE is missing; shipped configurations: ")
    assert "sft_tiny_moe.yaml" in error


@pytest.mark.parametrize("arguments", [["sfft"], [], ["sft", "--confg", "x"]])
def test_wrong_usage_ends_with_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "usage: nemo-rl-moe" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("raised", "code", "shown"),
    [
        (WorkerDiedError("worker 1 died\nits own words"), 1, "error: worker 1 died\nits own words\n"),
        (DataError(["line 3: bad", "line 4: bad"]), 2, "error: line 3: bad\nerror: line 4: bad\n"),
        (TrainingDivergedError("step 7 is NaN"), 3, "error: step 7 is NaN\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_how_a_run_ends_is_told_by_message_and_code(
    raised: BaseException, code: int, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing_run(*_: object) -> None:
        raise raised

    monkeypatch.setattr(training_cli, "_drive", failing_run)
    assert cli.main([*DRIVER, "sft.seed=1"]) == code
    assert capsys.readouterr().err == shown


def test_a_bug_keeps_its_stack_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing_run(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(training_cli, "_drive", failing_run)
    with pytest.raises(ZeroDivisionError):
        cli.main(DRIVER)


def test_a_request_to_stop_at_once_has_the_code_of_its_signal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted_run(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)

    monkeypatch.setattr(training_cli, "_drive", interrupted_run)
    former = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught:
        cli.main(DRIVER)
    assert caught.value.code == 143
    assert capsys.readouterr().err == "terminated\n"
    assert signal.getsignal(signal.SIGTERM) == former


def test_what_the_supervisor_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Supervision] = []

    def supervise(supervision: Supervision) -> int:
        told.append(supervision)
        return 7

    monkeypatch.setattr(supervisor, "supervise", supervise)
    monkeypatch.setattr(loading, "path_problems", lambda *_, **__: [])
    before = time.monotonic()
    arguments = ["sft", "sft.seed=7", "--config=sft_tiny_moe.yaml", "cluster.max_restarts=3", "~sft.val_batches"]
    assert cli.main([*arguments, "+sft.val_batches=null"]) == 7
    (supervision,) = told
    assert supervision.max_restarts == 3
    command = supervision.driver_command(2)
    start = command.index("nemo_rl_moe.cli") + 1
    assert command[0] == sys.executable
    assert command[start : start + 3] == ["sft", "--config", "sft_tiny_moe.yaml"]
    overrides = ["sft.seed=7", "cluster.max_restarts=3", "~sft.val_batches", "+sft.val_batches=null"]
    assert command[start + 3 : -6] == overrides
    assert (command[-6], command[-4:-1]) == ("--run-id", ["--restart-number", "2", "--started"])
    first = supervision.driver_command(0)
    assert (first[-5], first[-1]) == (command[-5], command[-1]), "restarts keep the id and the start of the run"
    assert before <= float(command[-1]) <= time.monotonic()
    # What the driver makes of it.
    drives: list[tuple[object, ...]] = []
    monkeypatch.setattr(training_cli, "_drive", lambda *given: drives.append(given))
    assert cli.main(command[start:]) == 0
    assert drives[0][:4] == ("sft", "sft_tiny_moe.yaml", overrides, RunLaunch(command[-5], 2, float(command[-1])))


@pytest.mark.parametrize(
    ("arguments", "code", "passed_on"),
    [(DRIVER, 1, EXIT_FAILURE_TOLD), (DRIVER, 0, 0), (DRIVER, 2, 2), (DRIVER, 3, 3), (["sft"], 1, 1)],
)
def test_the_supervisor_learns_that_a_failure_has_been_told(
    arguments: list[str], code: int, passed_on: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["cli.py", *arguments])
    monkeypatch.setattr(cli, "main", lambda: code)
    assert cli._main_of_a_process() == passed_on


def test_a_bug_of_the_driver_is_told_by_its_stack_trace(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["cli.py", *DRIVER])
    monkeypatch.setattr(cli, "main", lambda: 1 // 0)
    assert cli._main_of_a_process() == EXIT_FAILURE_TOLD
    assert "ZeroDivisionError" in capsys.readouterr().err


LIGHT = """
import sys
from nemo_rl_moe import cli
from nemo_rl_moe.config import loading
from nemo_rl_moe.launch import supervisor
loading.path_problems = lambda *given, **more: []
supervisor.supervise = lambda supervision: print(supervision.resume_hint())
cli.main(["sft", "--config", "sft_tiny_moe.yaml", f"logger.log_dir={sys.argv[1]}"])
print(sorted({"torch", "ray", "transformers", "megatron"} & set(sys.modules)))
"""


def test_the_supervisor_stays_light(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LIGHT, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    # Not where a demo may have left checkpoints to resume from.
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250)
    assert done.stdout == "None\n[]\n", done.stderr


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in ((["--version"], [__version__]), (["sft", "--help"], ["sft_tiny_moe.yaml", "~policy"])):
        with pytest.raises(SystemExit) as caught:
            cli.main(arguments)
        assert caught.value.code == 0
        printed = capsys.readouterr().out
        assert all(word in printed for word in words)


@pytest.mark.parametrize(("end", "code"), [("lambda: 3", 3), ("lambda: sys.exit(143)", 143)])
def test_a_thread_that_never_ends_does_not_keep_a_run(end: str, code: int) -> None:
    """Nor one that is asked to stop before there is anything to keep, which raises SystemExit."""
    program = (
        "import sys, threading, time\n"
        "from nemo_rl_moe import cli\n"
        "threading.Thread(target=time.sleep, args=(3600,)).start()\n"
        f"cli.main, cli.LEAVING_S = {end}, 0.2\n"
        "cli._run_process()\n"
    )
    done = subprocess.run([sys.executable, "-c", program, "--run-id", "x"], timeout=280, check=False)
    assert done.returncode == code
