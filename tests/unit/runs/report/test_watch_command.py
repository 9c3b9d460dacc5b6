# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_rl_moe import cli
from nemo_rl_moe.runs.folder.folder import create_run_folder
from tests.support.made_runs import make_run, random_counts


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)


def test_without_a_terminal_one_plain_frame_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = {step: {"train/loss": 10.0 - step} for step in range(1, 6)}
    run = make_run(tmp_path / "[bold]logs" / "exp_001", metrics, random_counts(5, 30, 8, 200))
    frames = []
    for arguments in (["--once"], [], ["--interval", "9"]):
        assert cli.main(["watch", *arguments, str(run)]) == 0
        frames.append(capsys.readouterr().out)
    assert len(set(frames)) == 1
    assert "\x1b" not in frames[0]
    lines = frames[0].splitlines()
    assert lines[0].startswith("[bold]logs/exp_001  sft  step 5/10  ")
    assert next(line for line in lines if line.startswith("loss ")).split()[1:3] == ["█▇▅▃▁", "5"]
    assert lines[-1] == "- no findings"
    # All layers: a pipe has no height.
    assert [line.split()[0] for line in lines if line.startswith("   ")] == [str(layer) for layer in range(30)]


def test_a_run_that_has_not_written_yet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = create_run_folder(tmp_path / "logs", algorithm="sft")
    assert cli.main(["watch", str(folder), "--once"]) == 0
    assert capsys.readouterr().out == "logs/exp_001\nnothing has been written yet; waiting for the first step\n"


def test_a_log_folder_names_its_newest_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("exp_2", "exp_10", "exp_9"):
        make_run(tmp_path / "logs" / name, {})
    for asked, what in ((tmp_path / "logs", "holds no metrics.jsonl"), (tmp_path / "logs/exp_11", "is no folder")):
        assert cli.main(["watch", str(asked)]) == 2
        expected = f"error: {asked}: {what}; did you mean {tmp_path}/logs/exp_10, the newest run there?\n"
        assert capsys.readouterr().err == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere\x1b[2J"], "error: nowhere\\x1b[2J: is no folder; expected a run, such as logs/sft/exp_001\n"),
        (["a", "--once", "b\x1b"], "error: watch: takes one RUN_DIR, got also 'b\\\\x1b'\n"),
    ],
)
def test_wrong_input_ends_with_one_line_and_code_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["watch", *arguments]) == 2
    assert capsys.readouterr().err == message


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "inf", "soon", "1e9"])
def test_wrong_intervals(interval: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["watch", str(tmp_path), f"--interval={interval}"])
    assert ended.value.code == 2
    message = f"argument --interval: got '{interval}', expected a number of seconds from 0.1 to 3600"
    assert message in capsys.readouterr().err


def test_metrics_that_cannot_be_read_end_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = create_run_folder(tmp_path / "logs")
    (folder / "metrics.jsonl").mkdir()
    assert cli.main(["watch", str(folder)]) == 2
    assert capsys.readouterr().err == f"error: {folder}/metrics.jsonl: cannot be read: Is a directory\n"


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["watch", "--help"])
    assert ended.value.code == 0
    reported = capsys.readouterr().out
    for words in ("RUN_DIR", "--once", "--interval SECONDS", "Ctrl-C", "yellow or x a dead", "examples:"):
        assert words in reported


@pytest.mark.full
@pytest.mark.parametrize("command", [["watch", "--once"], pytest.param(["report"], marks=pytest.mark.full)])
def test_nothing_heavy_is_imported(command: list[str], tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {1: {"train/loss": 1.0}}, random_counts(1, 2, 4, 50))
    script = (
        "import sys; from nemo_rl_moe.cli import main; assert main(sys.argv[1:]) == 0;"
        "print(sorted({'torch', 'ray', 'megatron', 'matplotlib', 'transformers'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *command, str(run)], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"
