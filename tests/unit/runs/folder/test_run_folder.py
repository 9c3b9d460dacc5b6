# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The numbered folder, and the files that say what ran."""

import json
import os
import subprocess
import sys
from datetime import datetime
from enum import Enum
from pathlib import Path

import pytest
import yaml

from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.runs.folder.folder import (
    create_run_folder,
    find_run_folder,
    newest_run_folders,
    read_git_state,
    write_run_files,
)


def test_folders_are_numbered_and_the_number_goes_on(tmp_path: Path) -> None:
    log_dir = tmp_path / "logs" / "sft"
    assert create_run_folder(log_dir) == log_dir / "exp_001"
    assert create_run_folder(str(log_dir)) == log_dir / "exp_002"
    (log_dir / "exp_041").mkdir()
    (log_dir / "exp_final").mkdir()
    assert create_run_folder(log_dir).name == "exp_042"
    (log_dir / "exp_999").mkdir()
    assert create_run_folder(log_dir).name == "exp_1000"


def test_processes_that_race_get_different_folders(tmp_path: Path) -> None:
    code = (
        "import sys; from nemo_rl_moe.runs.folder.folder import create_run_folder\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "print(*[create_run_folder(sys.argv[1]).name for _ in range(100)])\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
    processes = [subprocess.Popen(command, **pipes) for _ in range(2)]  # type: ignore[call-overload]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    names = [name for process in processes for name in process.communicate(timeout=280)[0].split()]
    assert len(names) == 200
    assert sorted(names) == [f"exp_{number:03d}" for number in range(1, 201)]


def test_folder_that_cannot_be_made_is_the_users_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for log_dir in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigurationError, match=r"^logger\.log_dir: .*file.* cannot hold the run's folder"):
            create_run_folder(log_dir)


class Precision(Enum):
    FLOAT32 = "float32"


def test_run_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = {
        "policy": {"precision": Precision.FLOAT32, "lr": 1e-5, "betas": (0.9, 0.95), "path": Path("a/b"), "x": None}
    }
    write_run_files(tmp_path, config, {"effective_moe_config": {"num_moe_experts": 8}})
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == {
        "policy": {"precision": "float32", "lr": 1e-5, "betas": [0.9, 0.95], "path": "a/b", "x": None}
    }
    versions = json.loads((tmp_path / "versions.json").read_text())
    assert versions["python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}.")
    assert versions["packages"]["rich"]
    assert json.loads((tmp_path / "effective_moe_config.json").read_text()) == {"num_moe_experts": 8}
    assert json.loads((tmp_path / "git.json").read_text())["available"] is False


def test_a_run_is_found_by_its_id(tmp_path: Path) -> None:
    log_dir = tmp_path / "logs"
    assert newest_run_folders(log_dir) == []
    assert find_run_folder(log_dir, "a" * 32) is None
    folders = [create_run_folder(log_dir, letter * 32, "sft") for letter in "abc"]
    content = json.loads((folders[0] / "run.json").read_text())
    assert (content["run_id"], content["algorithm"]) == ("a" * 32, "sft")
    assert datetime.fromisoformat(content["created"]).tzinfo is not None
    assert newest_run_folders(log_dir) == folders[::-1]
    assert find_run_folder(str(log_dir), "b" * 32) == folders[1]
    for broken in ("", "[]", '{"run_id": 1}'):
        (folders[2] / "run.json").write_text(broken)
        assert find_run_folder(log_dir, "c" * 32) is None


def test_a_resumed_run_keeps_the_files_of_the_first_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_run_files(tmp_path, {"lr": 1}, {"moe": {"a": 1}})
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    write_run_files(tmp_path, {"lr": 1}, {"moe": {"a": 1}}, resumed_at=4)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    write_run_files(tmp_path, {"lr": 2}, {"moe": {"a": 1}}, resumed_at=8)
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert yaml.safe_load(after.pop("config_resumed_at_step_8.yaml")) == {"lr": 2}
    assert after == before


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "init.defaultBranch=main"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_git_state_of_a_repository(tmp_path: Path) -> None:
    git(tmp_path, "init")
    assert read_git_state(tmp_path)["commit"] is None
    (tmp_path / "a.txt").write_text("one\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    (tmp_path / "below").mkdir()
    clean = read_git_state(tmp_path / "below")
    assert clean == {
        "available": True,
        "root": str(tmp_path.resolve()),
        "commit": git(tmp_path, "rev-parse", "HEAD"),
        "branch": "main",
        "dirty": False,
        "untracked_files": 0,
        "diff_stat": [],
    }
    (tmp_path / "a.txt").write_text("two\n")
    (tmp_path / "new.txt").write_text("")
    git(tmp_path, "checkout", "--detach")
    dirty = read_git_state(tmp_path)
    assert dirty["dirty"] is True
    assert dirty["branch"] is None
    assert dirty["untracked_files"] == 1
    assert any("a.txt" in line for line in dirty["diff_stat"])


def test_git_state_without_a_repository_or_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = read_git_state(tmp_path)
    assert state["available"] is False
    assert "not a git repository" in state["reason"]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_git_state(tmp_path) == {"available": False, "reason": "git is not installed"}
