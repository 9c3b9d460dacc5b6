# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Secrets of a configuration: readable in no place that it leaves the process for, and usable all the same."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from nemo_rl_moe.checkpoints.changes import changed_keys
from nemo_rl_moe.cli import main
from nemo_rl_moe.config.loading import dump_resolved, load_config, load_dumped
from nemo_rl_moe.launch import start
from nemo_rl_moe.launch.supervisor import Supervision
from nemo_rl_moe.runs.folder.folder import write_run_files
from nemo_rl_moe.runs.folder.run_data import describe_run
from nemo_rl_moe.runs.loggers.console import ConsoleLogger
from nemo_rl_moe.runs.loggers.factory import build_loggers
from nemo_rl_moe.runs.report.page_data import configuration_rows
from tests.unit.config.test_nemo_rl import COMMON, GENERATION, GRPO, write

SECRETS = ("hf_abcdef123456", "pa55word")
VARIABLES = "policy.megatron_cfg.env_vars"
OVERRIDES = (
    f"+{VARIABLES}.HF_TOKEN={SECRETS[0]}",
    f"logger.mlflow.tracking_uri=http://me:{SECRETS[1]}@host:5000",
    "data.train.path=of_the_hub",
    "data.validation=null",
)


def leaked(text: str) -> list[str]:
    return [secret for secret in SECRETS if secret in text]


def test_config_prints_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--config", "sft_tiny_moe.yaml", *OVERRIDES, f"+{VARIABLES}.NCCL_DEBUG=INFO"]) == 0
    printed = capsys.readouterr().out
    assert leaked(printed) == []
    values = yaml.safe_load(printed)
    assert values["policy"]["megatron_cfg"]["env_vars"] == {"HF_TOKEN": "***", "NCCL_DEBUG": "INFO"}
    assert values["logger"]["mlflow"]["tracking_uri"] == "http://me:***@host:5000"


def test_workers_get_them_as_they_are() -> None:
    config = load_config("sft_tiny_moe.yaml", OVERRIDES, check_paths=False)
    assert config.policy.megatron_cfg.env_vars == {"HF_TOKEN": SECRETS[0]}
    assert config.logger.mlflow.tracking_uri == f"http://me:{SECRETS[1]}@host:5000"


def test_what_was_printed_does_not_start(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    main(["config", "--config", "sft_tiny_moe.yaml", *OVERRIDES])
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out)
    assert main(["config", "--config", str(printed)]) == 2
    reported = capsys.readouterr().err
    for key in (f"{VARIABLES}.HF_TOKEN", "logger.mlflow.tracking_uri"):
        assert f"error: {key}: got ***, which replaced a secret" in reported
    assert main(["config", "--config", str(printed), *OVERRIDES]) == 0


def test_the_run_s_folder_keeps_none_for_its_owner_alone(tmp_path: Path) -> None:
    config = load_config("sft_tiny_moe.yaml", OVERRIDES, check_paths=False)
    write_run_files(tmp_path, dump_resolved(config), {})
    kept = tmp_path / "config.yaml"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert leaked(kept.read_text()) == []
    # A resumed run writes the same, and so no further file.
    write_run_files(tmp_path, dump_resolved(config), {}, resumed_at=3)
    assert [path.name for path in tmp_path.glob("config*")] == ["config.yaml"]


def test_the_report_shows_none_of_an_older_run(tmp_path: Path) -> None:
    config = load_config("sft_tiny_moe.yaml", OVERRIDES, check_paths=False)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    assert leaked((tmp_path / "config.yaml").read_text()) == list(SECRETS)
    assert leaked(json.dumps(configuration_rows([describe_run(tmp_path)]))) == []


def test_a_resumed_run_compares_without_them() -> None:
    before = {"env": {"reward": {"parameters": {"api_key": SECRETS[0], "url": f"http://me:{SECRETS[1]}@h", "n": 1}}}}
    now = {"env": {"reward": {"parameters": {"api_key": "another", "url": "http://me:other@h", "n": 2}}}}
    assert changed_keys(before, now) == {"env.reward.parameters.n": ("1", "2")}


@pytest.mark.full
def test_no_logger_gets_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "logs" / "run_001"
    folder.mkdir(parents=True)
    enabled = [f"logger.{name}_enabled=true" for name in ("tensorboard", "wandb", "mlflow")]
    overrides = [f"logger.log_dir={tmp_path / 'logs'}", *enabled, OVERRIDES[0], f"+{VARIABLES}.SEEN=seen_by_all"]
    overrides.append(f"+{VARIABLES}.STORE=http://me:{SECRETS[1]}@host:5000")
    config = load_config("sft_tiny_moe.yaml", overrides, check_paths=False)
    loggers = build_loggers(config.logger, folder, ConsoleLogger(total_steps=1), None)
    loggers.log_config(dump_resolved(config))
    loggers.log_step(1, {"train/loss": 1.0})
    loggers.close()
    files = [path for path in tmp_path.rglob("*") if path.is_file() and not path.is_symlink()]
    found = {path: path.read_bytes() for path in files}
    assert [path for path, content in found.items() for secret in SECRETS if secret.encode() in content] == []
    seen = {path.suffix for path, content in found.items() if b"seen_by_all" in content}
    assert {".db", ".wandb"} <= seen
    assert any("tfevents" in path.name for path, content in found.items() if b"seen_by_all" in content)


@pytest.mark.parametrize(
    ("override", "reported"),
    [
        (f"+{VARIABLES}.HF_TOKEN=5551234567", f"{VARIABLES}.HF_TOKEN: got '***' (int), expected text"),
        (f"+{VARIABLES}.HF_TOKEN=[s3cret", f"{VARIABLES}.HF_TOKEN: '***' is not valid YAML"),
        (f"+{VARIABLES}={{HF_TOKEN: s3cret", "{HF_TOKEN: ***' is not valid YAML"),
        (f"{VARIABLES}.HF_TOKEN = s3cret", "HF_TOKEN =***': expected section.key=value"),
        (f"+{VARIABLES}.HF_TOKEN=s3cret${{oc.env:X}}", f"{VARIABLES}.HF_TOKEN: '***' is not allowed"),
        (f"+{VARIABLES}.HF_TOKEN=s3cret${{no.such}}", f"{VARIABLES}.HF_TOKEN: '***' names no key"),
        ("logger.mlflow.tracking_urn=http://me:s3cret@h", "logger.mlflow.tracking_urn: unknown key"),
        ("data.train.path=http://me:s3cret@h/a.jsonl", "http:/me:***@h/a.jsonl not found"),
    ],
)
def test_no_message_has_them(capsys: pytest.CaptureFixture[str], override: str, reported: str) -> None:
    assert main(["sft", "--config", "sft_tiny_moe.yaml", override]) == 2
    lines = capsys.readouterr().err
    assert reported in lines
    assert "5551234567" not in lines
    assert "s3cret" not in lines


OWN_COMMAND_LINE = """
import sys
from nemo_rl_moe.launch.start import take_process
take_process(sys.argv[1:])
"""
OF_A_SUPERVISOR = """
import sys
from nemo_rl_moe.config.loading import load_config
from nemo_rl_moe.launch import start
start.supervise = lambda supervision: 0
start.train(load_config("sft_tiny_moe.yaml", sys.argv[1:], check_paths=False), sys.argv[1:], owns_process=True)
"""
SHOW_COMMAND_LINES = """
import psutil
print(sys.argv)
for process in (psutil.Process(), *psutil.Process().children()):
    print(process.cmdline())
"""


@pytest.mark.parametrize(
    ("program", "more", "processes"),
    [
        pytest.param(OWN_COMMAND_LINE, "sft.seed=3", 2, id="the run and its watcher"),
        pytest.param(OF_A_SUPERVISOR, "cluster.max_restarts=1", 1, id="the supervisor"),
    ],
)
def test_they_do_not_stand_on_the_command_lines_of_the_run(program: str, more: str, processes: int) -> None:
    """Ray's dashboard and W&B have the command line of the process, and anybody on the machine sees it."""
    command = [sys.executable, "-c", program + SHOW_COMMAND_LINES, *OVERRIDES, more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=True)
    assert leaked(done.stdout) == []
    assert done.stdout.count(more) == 1 + processes, done.stderr


def test_a_supervisor_hands_them_on_by_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither on the command line nor in a variable; what the process reads holds them."""
    seen: list[Supervision] = []
    monkeypatch.setattr(start, "supervise", lambda supervision: seen.append(supervision) or 0)
    monkeypatch.setenv("PYTHONPATH", "")
    config = load_config("sft_tiny_moe.yaml", [*OVERRIDES, "cluster.max_restarts=1"], check_paths=False)
    assert start.train(config, OVERRIDES, owns_process=True) == 0
    (supervision,) = seen
    assert leaked(" ".join([*supervision.command(0), *os.environ.values()])) == []
    assert load_dumped(supervision.stdin) == config


def test_a_translation_from_nemo_rl_copies_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    variables = {"HF_TOKEN": SECRETS[0], "NCCL_DEBUG": "INFO"}
    path = write(tmp_path, COMMON, GRPO, GENERATION, policy__megatron_cfg__env_vars=variables)
    assert main(["config", "--from-nemo-rl", str(path)]) == 2
    reported = capsys.readouterr()
    assert leaked(reported.out + reported.err) == []
    assert f"{VARIABLES}.HF_TOKEN: got ***, which replaced a secret" in reported.err
    assert "NCCL_DEBUG: INFO" in reported.out
