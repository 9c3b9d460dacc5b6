# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Run folders `exp_001`, `exp_002`, ..., and the files that identify a run: id, configuration, versions, commit."""

import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import uuid
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import yaml

import nemo_rl_moe
from nemo_rl_moe.atomic_writes import write_whole
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.runs.folder.lines import to_plain

CONFIG_FILE_NAME = "config.yaml"

RUN_FILE_NAME = "run.json"
LOGGER_RUN_IDS_FILE_NAME = "logger_run_ids.json"

_FOLDER_PATTERN = re.compile(r"exp_(\d+)")
_GIT_TIMEOUT_SECONDS = 20
_PACKAGES = (
    "torch",
    "megatron-core",
    "ray",
    "transformers",
    "tokenizers",
    "datasets",
    "numpy",
    "omegaconf",
    "pydantic",
    "tensorboard",
    "wandb",
    "mlflow",
    "rich",
    "transformer-engine",
    "vllm",
)


def create_run_folder(log_dir: str | Path, run_id: str | None = None, algorithm: str | None = None) -> Path:
    """Create and return the next free folder `exp_001`, `exp_002`, ... in a log folder. The log folder is created if
    needed.

    Two processes that call this function at the same moment get different folders.

    Args:
        run_id: Id by which `find_run_folder` finds the folder again. Random by default.
    """
    parent = Path(log_dir)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        taken = [int(match[1]) for entry in parent.iterdir() if (match := _FOLDER_PATTERN.fullmatch(entry.name))]
        number = max(taken, default=0) + 1
        while True:
            folder = parent / f"exp_{number:03d}"
            try:
                folder.mkdir()  # succeeds in exactly one of several processes
            except FileExistsError:
                number += 1
                continue
            created = datetime.now(timezone.utc).isoformat(timespec="seconds")  # noqa: UP017  (new in Python 3.11)
            content = {"run_id": run_id or uuid.uuid4().hex, "algorithm": algorithm, "created": created}
            write_whole(folder / RUN_FILE_NAME, _json_text(content))
            return folder
    except OSError as error:
        raise ConfigurationError(
            f"logger.log_dir: {str(log_dir)!r} cannot hold the run's folder: {error.strerror}; "
            "expected a folder that you may write to"
        ) from error


def newest_run_folders(log_dir: str | Path) -> list[Path]:
    """Return the run folders in a log folder, newest first."""
    parent = Path(log_dir)
    entries = list(parent.iterdir()) if parent.is_dir() else []
    numbered = [(int(match[1]), path) for path in entries if (match := _FOLDER_PATTERN.fullmatch(path.name))]
    return [path for _, path in sorted(numbered, reverse=True) if path.is_dir()]


def find_run_folder(log_dir: str | Path, run_id: str) -> Path | None:
    """Return the run folder whose run has this id, or None."""
    return next((folder for folder in newest_run_folders(log_dir) if read_run_id(folder) == run_id), None)


def read_run_id(folder: Path) -> str | None:
    """Return the id of a folder's run. None if `run.json` is missing or damaged."""
    run_id = _read_object(folder / RUN_FILE_NAME).get("run_id")
    return run_id if isinstance(run_id, str) else None


def store_logger_run_ids(folder: Path, run_ids: Mapping[str, str]) -> None:
    """Store the run's ids at W&B and MLflow, in case the run is killed before its first checkpoint stores these ids.

    Raises:
        OSError: The file cannot be written. It keeps its content.
    """
    write_whole(folder / LOGGER_RUN_IDS_FILE_NAME, _json_text(dict(run_ids)))


def read_logger_run_ids(folder: Path) -> dict[str, str]:
    """Return the ids that `store_logger_run_ids` stored. Empty if the file is missing or damaged."""
    content = _read_object(folder / LOGGER_RUN_IDS_FILE_NAME)
    return {name: run_id for name, run_id in content.items() if isinstance(run_id, str)}


def write_run_files(
    folder: Path, resolved_config: Mapping[str, Any], extra: Mapping[str, Any], resumed_at: int | None = None
) -> None:
    """Write the files with which a run can be reproduced.

    `config.yaml` is the resolved configuration, readable by its owner only. `versions.json` has the versions of Python
    and of the packages, `git.json` the state of the git checkout around the working directory. A resumed run does not
    change these files. If a content differs, it is written to a new file, such as `config_resumed_at_step_40.yaml`.
    """
    config = yaml.safe_dump(to_plain(resolved_config), sort_keys=False, allow_unicode=True)
    contents = {"versions": collect_versions(), "git": read_git_state(Path.cwd()), **extra}
    texts = {CONFIG_FILE_NAME: config, **{f"{name}.json": _json_text(content) for name, content in contents.items()}}
    for name, text in texts.items():
        path = folder / name
        if resumed_at is not None and path.is_file():
            if path.read_text(encoding="utf-8") == text:
                continue
            path = folder / f"{path.stem}_resumed_at_step_{resumed_at}{path.suffix}"
        write_whole(path, text, private=name == CONFIG_FILE_NAME)


def collect_versions() -> dict[str, Any]:
    """Return the versions of Python, the platform and the packages that affect a run's numbers."""
    return {
        "nemo_rl_moe": nemo_rl_moe.__version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "packages": {name: _package_version(name) for name in _PACKAGES},
    }


def read_git_state(directory: Path) -> dict[str, Any]:
    """Return the state of the git checkout around a directory, or the reason why there is none.

    The remote's address is omitted, since it may contain a password.
    """
    try:
        root = _git(directory, "rev-parse", "--show-toplevel")
        status = _git(directory, "status", "--porcelain").splitlines()
        commit = _git_or_none(directory, "rev-parse", "--verify", "--quiet", "HEAD")
        return {
            "available": True,
            "root": root,
            "commit": commit,
            "branch": _git_or_none(directory, "symbolic-ref", "--quiet", "--short", "HEAD"),
            "dirty": bool(status),
            "untracked_files": sum(line.startswith("??") for line in status),
            "diff_stat": _git(directory, "diff", "--stat", "HEAD").splitlines() if commit else [],
        }
    except FileNotFoundError:
        return {"available": False, "reason": "git is not installed"}
    except subprocess.CalledProcessError as error:
        return {"available": False, "reason": " ".join(error.stderr.split()) or f"git ended with {error.returncode}"}
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"available": False, "reason": f"git could not be run: {error}"}


def _git(directory: Path, *arguments: str) -> str:
    # Without optional locks, this does not disturb a git command that the user runs meanwhile.
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    done = subprocess.run(
        ["git", "-C", str(directory), *arguments],
        capture_output=True,
        text=True,
        errors="replace",
        check=True,
        timeout=_GIT_TIMEOUT_SECONDS,
        env=environment,
    )
    return done.stdout.rstrip("\n")


def _git_or_none(directory: Path, *arguments: str) -> str | None:
    try:
        return _git(directory, *arguments) or None
    except subprocess.CalledProcessError:
        return None


def _package_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _json_text(content: Any) -> str:
    return json.dumps(to_plain(content), indent=2) + "\n"
