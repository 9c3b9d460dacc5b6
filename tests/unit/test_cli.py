# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from nemo_rl_moe import __version__, cli
from nemo_rl_moe.config.loading import load_config
from nemo_rl_moe.config.resolved import dump_resolved
from nemo_rl_moe.errors import DataError, WorkerDiedError

REPOSITORY = Path(__file__).resolve().parents[2]


def run_script(arguments: list[str], folder: Path) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, str(REPOSITORY / "examples" / "run_sft.py"), *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)


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
    assert [line.split(":")[1].strip() for line in lines[2:]] == [
        "policy.model_name",
        "data.train.path",
        "data.validation.path",
    ]
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
    assert dump_resolved(expected)["policy"]["tokenizer"]["name"] == "examples/assets/tiny_qwen3_moe"


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
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_how_a_run_ends_is_told_by_message_and_code(
    raised: BaseException, code: int, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing_run(*_: object) -> None:
        raise raised

    monkeypatch.setitem(cli._COMMANDS, "sft", failing_run)
    assert cli.main(["sft", "--config", "sft_tiny_moe.yaml"]) == code
    assert capsys.readouterr().err == shown


def test_a_bug_keeps_its_stack_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing_run(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setitem(cli._COMMANDS, "sft", failing_run)
    with pytest.raises(ZeroDivisionError):
        cli.main(["sft", "--config", "sft_tiny_moe.yaml"])


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in ((["--version"], [__version__]), (["sft", "--help"], ["sft_tiny_moe.yaml", "~policy"])):
        with pytest.raises(SystemExit) as caught:
            cli.main(arguments)
        assert caught.value.code == 0
        printed = capsys.readouterr().out
        assert all(word in printed for word in words)
