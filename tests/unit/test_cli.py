# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
import errno
import io
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from nemo_rl_moe import __version__, cli
from nemo_rl_moe.config import loading
from nemo_rl_moe.config.files import exemplar_names
from nemo_rl_moe.config.loading import dump_resolved, load_config
from nemo_rl_moe.errors import DataError, TrainingDivergedError, WorkerDiedError
from nemo_rl_moe.launch import start
from nemo_rl_moe.launch.start import RunLaunch
from nemo_rl_moe.launch.supervisor import Supervision

REPOSITORY = Path(__file__).resolve().parents[2]


RUN = ["sft", "--config", "sft_tiny_moe.yaml", "checkpointing.resume=never"]


@pytest.fixture
def without_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the check that data are there."""
    monkeypatch.setattr(loading, "path_problems", lambda *_, **__: [])


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


HUB_DATA = ("data.train.path=sums", "data.validation=null")
"""Data that no command asks for before a run reads it."""


def test_config_prints_what_loads_to_the_same(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["config", "--config", "sft_tiny_moe.yaml", "sft.seed=7", *HUB_DATA]) == 0
    printed = capsys.readouterr().out
    expected = load_config("sft_tiny_moe.yaml", ["sft.seed=7", *HUB_DATA], check_paths=False)
    assert yaml.safe_load(printed)["sft"]["seed"] == 7
    (tmp_path / "printed.yaml").write_text(printed)
    assert load_config("printed.yaml", check_paths=False) == expected
    # No such folder is here: that of the package.
    assert dump_resolved(expected)["policy"]["tokenizer"]["name"] == str(REPOSITORY / "examples/assets/tiny_qwen3_moe")


def test_config_proposes_a_rate_for_adapters_beside_what_it_prints(capsys: pytest.CaptureFixture[str]) -> None:
    adapters = "{rank: 4, alpha: 8, use_rslora: false, targets: [all-linear], dropout: 0, experts: none, init: kaiming}"
    words = [f"policy.lora={adapters}", "+policy.lora.path=null", "policy.megatron_cfg.optimizer.lr=1e-5"]
    data = ["data.train.path=sums", "data.validation.path=no/such/file.jsonl"]
    assert cli.main(["config", "--config", "sft_tiny_moe.yaml", *words, *data]) == 2
    printed = capsys.readouterr()
    assert yaml.safe_load(printed.out)["policy"]["lora"]["rank"] == 4
    warning, *problems = printed.err.splitlines()
    assert warning.startswith("warning: policy.megatron_cfg.optimizer.lr: 1e-05 is usual for all weights; adapters (")
    assert problems
    assert all(line.startswith("error: data.validation.path: ") for line in problems)


def test_overrides_may_stand_before_and_behind_the_config(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["config", "sft.seed=7", "--config=sft_tiny_moe.yaml", "sft.max_num_steps=30", "+sft.seed=8", *HUB_DATA]
    assert cli.main(arguments) == 0
    sft = yaml.safe_load(capsys.readouterr().out)["sft"]
    assert (sft["seed"], sft["max_num_steps"]) == (8, 30)


def test_missing_config_says_where_the_shipped_ones_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sft", "sft.seed=1"]) == 2
    assert capsys.readouterr().err == (
        "error: sft: --config FILE is missing (nemo-rl-moe config --help lists the shipped configurations)\n"
    )


def test_help_parts_each_shipped_configuration_from_its_summary(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["sft", "--help"])
    found = set(re.findall(r"^  (\S+\.yaml)  ", capsys.readouterr().out, re.MULTILINE))
    assert found == {"sft.yaml", "grpo.yaml", *exemplar_names()}


def test_a_file_without_its_option_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sft", "my_run.yaml", "sft.seed=1"]) == 2
    assert capsys.readouterr().err == "error: sft: --config is missing; did you mean --config my_run.yaml?\n"


def test_overrides_with_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["sft", "--config", "sft_tiny_moe.yaml", "--sft.seed=1"])
    assert "unrecognized arguments: --sft.seed=1; overrides are written without dashes" in capsys.readouterr().err


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
        (OSError(errno.ENOSPC, "No space left on device", "logs/a"), 1, "error: logs/a: No space left on device\n"),
    ],
)
@pytest.mark.usefixtures("without_data")
def test_how_a_run_ends_is_reported_by_message_and_code(
    raised: BaseException, code: int, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing_run(*_: object) -> None:
        raise raised

    monkeypatch.setattr(start, "launch_run", failing_run)
    assert cli.main([*RUN, "sft.seed=1"]) == code
    assert capsys.readouterr().err == shown


_PATH = "PATH"


@pytest.mark.parametrize(
    "arguments",
    [
        ["config", "--config", _PATH],
        ["config", "--from-nemo-rl", _PATH],
        ["plan", "--config", "sft_tiny_moe.yaml", f"policy.model_name={_PATH}"],
        ["data", "--config", "sft_tiny_moe.yaml", "data.validation=null", f"data.train.path={_PATH}"],
        ["convert", "--from", "hf", "--to", "hf", "--input", _PATH, "--output", "converted"],
        ["report", _PATH],
        ["watch", "--once", _PATH],
        ["verify", _PATH],
        ["audit", _PATH],
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
@pytest.mark.parametrize("kind", ["a text", "in a folder of somebody else's"])
def test_a_path_that_cannot_be_looked_at_is_one_line(
    kind: str, arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o000)
    if kind != "a text" and os.access(locked, os.X_OK):
        pytest.skip("this user may enter every folder")
    path, reason = ("7+8=" * 100, "File name too long") if kind == "a text" else (f"{locked}/x", "Permission denied")
    assert cli.main([word.replace(_PATH, path) for word in arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert path in line
    assert line.endswith(reason)


@pytest.mark.usefixtures("without_data")
def test_a_bug_keeps_its_stack_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing_run(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(start, "launch_run", failing_run)
    with pytest.raises(ZeroDivisionError):
        cli.main(RUN)


@pytest.mark.usefixtures("without_data")
def test_a_request_to_stop_at_once_has_the_code_of_its_signal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted_run(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)

    monkeypatch.setattr(start, "launch_run", interrupted_run)
    former = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught:
        cli.main(RUN)
    assert caught.value.code == 143
    assert capsys.readouterr().err == "terminated\n"
    assert signal.getsignal(signal.SIGTERM) == former


@pytest.mark.usefixtures("without_data")
def test_the_supervisor_hands_on_the_resolved_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[Supervision] = []

    def supervise(supervision: Supervision) -> int:
        reported.append(supervision)
        return 7

    monkeypatch.setattr(start, "supervise", supervise)
    before = time.monotonic()
    overrides = ["sft.seed=7", "cluster.max_restarts=3", "~sft.val_batches", "+sft.val_batches=null"]
    monkeypatch.setattr(sys, "argv", ["nemo-rl-moe", "sft", "--config=sft_tiny_moe.yaml", *overrides])
    monkeypatch.setenv("PYTHONPATH", "")
    assert cli.main() == 7
    (supervision,) = reported
    assert supervision.max_restarts == 3
    command, first = supervision.command(2), supervision.command(0)
    assert command[-6:-1] == ["--run-id", command[-5], "--restart-number", "2", "--started"]
    assert (first[-5], first[-1]) == (command[-5], command[-1]), "restarts keep the id and the start of the run"
    assert before <= float(command[-1]) <= time.monotonic()
    # What the process makes of it, which reads no file.
    runs: list[tuple[object, ...]] = []
    monkeypatch.setattr(start, "launch_run", lambda *given: runs.append(given))
    monkeypatch.setattr(start, "watch_this_process", lambda: None)
    monkeypatch.setattr(sys, "stdin", io.StringIO(supervision.stdin))
    monkeypatch.setattr(loading, "find_config", None)
    assert cli.main(command[command.index("nemo_rl_moe.cli") + 1 :]) == 0
    ((config, launch, _),) = runs
    monkeypatch.undo()
    assert config == load_config("sft_tiny_moe.yaml", overrides, check_paths=False)
    assert launch == RunLaunch(command[-5], 2, float(command[-1]))


LIGHT = """
import sys
from nemo_rl_moe import cli
from nemo_rl_moe.config import loading
from nemo_rl_moe.launch import start
loading.path_problems = lambda *given, **more: []
start.supervise = lambda supervision: print(supervision.resume_hint())
sys.argv[1:] = ["sft", "--config", "sft_tiny_moe.yaml", f"logger.log_dir={sys.argv[1]}", "cluster.max_restarts=1"]
cli.main()
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


@pytest.mark.parametrize(("end", "code"), [("return 3", 3), ("sys.exit(143)", 143)])
def test_a_thread_that_never_ends_does_not_keep_a_run(end: str, code: int) -> None:
    """Nor one that is asked to stop before there is anything to keep, which raises SystemExit."""
    program = (
        "import sys, threading, time\n"
        "from nemo_rl_moe import cli\n"
        "from nemo_rl_moe.distributed import run_process\n"
        "def run(words, owns_process):\n"
        "    run_process.watch_this_process()\n"
        "    threading.Thread(target=time.sleep, args=(3600,)).start()\n"
        f"    {end}\n"
        "cli._run, run_process.LEAVING_S = run, 0.2\n"
        "sys.exit(cli.main())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], timeout=280, check=False)
    assert done.returncode == code
