# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What tests of whole runs share: the demo's data, model folders, settings, and the command that a user types."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import Any

import psutil

from nemo_rl_moe import demo_data
from nemo_rl_moe.runs.folder.metrics import METRICS_FILE_NAME, read_metrics
from nemo_rl_moe.runs.folder.saved_samples import SAMPLES_FILE_NAME
from tests.functional import shared_ray

REPOSITORY_ROOT = Path(__file__).resolve().parents[2]
EXEMPLAR = REPOSITORY_ROOT / "examples/configs/sft_tiny_moe.yaml"
MODEL = REPOSITORY_ROOT / "examples/assets/tiny_qwen3_moe"
JSONL_ONLY = ("tensorboard_enabled", "wandb_enabled", "mlflow_enabled")


def make_model_folder(folder: Path, model: Path = MODEL, **changes: Any) -> Path:
    """A shipped tiny model with some fields of its `config.json` changed."""
    shutil.copytree(model, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def make_additions(folder: Path, num_train: int, num_validation: int) -> Path:
    """Some of the demo's data, made in this process: reasoning-gym takes longer to import than to draw them."""
    sizes = {"--num-train": num_train, "--num-validation": num_validation, "--num-grpo-prompts": 0}
    words = [str(word) for pair in sizes.items() for word in pair]
    with redirect_stdout(StringIO()):
        assert demo_data.main(["--output", str(folder), *words]) == 0
    return folder


def settings(folder: Path, data: Path, model: Path = MODEL, **changes: Any) -> list[str]:
    """Overrides of the tiny exemplar for a run that writes below `folder` and nowhere else.

    Args:
        folder: Gets the log folder `logs`.
        data: Holds `train.jsonl` and `validation.jsonl`.
        model: The model's folder.
        changes: Keys; two underscores for a dot.
    """
    values: dict[str, Any] = {
        "policy.model_name": model,
        "data.train.path": data / "train.jsonl",
        "data.validation.path": data / "validation.jsonl",
        "logger.log_dir": folder / "logs",
        "checkpointing.checkpoint_dir": None,
    }
    return as_overrides(values, changes)


def as_overrides(values: dict[str, Any], changes: dict[str, Any]) -> list[str]:
    """Keys and values as the command line has them; in the names of `changes`, two underscores stand for a dot."""
    values = values | {name.replace("__", "."): value for name, value in changes.items()}
    return [f"{name}={_as_yaml(value)}" for name, value in values.items()]


def _as_yaml(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool | list | dict | None) else str(value)


def only_jsonl() -> dict[str, bool]:
    """Switches off every logger that is not always on."""
    return {f"logger__{name}": False for name in JSONL_ONLY}


def sft_command(overrides: list[str]) -> list[str]:
    """Return the command that a user types."""
    return [sys.executable, str(REPOSITORY_ROOT / "examples/run_sft.py"), "--config", str(EXEMPLAR), *overrides]


def run_here(overrides: list[str], folder: Path, **how: Any) -> subprocess.CompletedProcess[str]:
    """Runs the same in this process, on the Ray that tests share; `how` as for `shared_ray.run_here`."""
    return shared_ray.run_here(["sft", "--config", str(EXEMPLAR), *overrides], folder, **how)


def run_command(
    command: Sequence[str], cwd: Path, *, timeout: float = 540, exit_code: int | None = 0
) -> subprocess.CompletedProcess[str]:
    """Runs a command in a process of its own, to its end with this exit code or, for None, with any."""
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment(), cwd=cwd, timeout=timeout, check=False
    )
    return shared_ray.ended_with(exit_code, done)


def environment() -> dict[str, str]:
    """Return this process's environment; child processes look for modules where this one does."""
    search_path = os.pathsep.join([str(REPOSITORY_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    inherited = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return {**inherited, "PYTHONPATH": search_path, "COLUMNS": "120"}


def only_run_folder(folder: Path) -> Path:
    """The folder of the one run that logged below `folder`."""
    (run_folder,) = (folder / "logs").iterdir()
    return run_folder


def steps_of(run_folder: Path) -> list[dict[str, float]]:
    """The metrics of each step."""
    return [record.metrics for record in read_metrics(run_folder / METRICS_FILE_NAME) if record.step]


def samples_of(run_folder: Path) -> list[dict[str, Any]]:
    """The saved samples, as they stand in their file."""
    lines = (run_folder / SAMPLES_FILE_NAME).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def outcome_of(folder: Path) -> tuple[list[dict[str, float]], list[dict[str, Any]]]:
    """The metrics of the steps of the one run that logged below `folder`, and its samples."""
    run_folder = only_run_folder(folder)
    return steps_of(run_folder), samples_of(run_folder)


def running(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Return the processes that have not ended; one whose exit code nobody has asked for has."""
    found = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def words_of(process: psutil.Process) -> list[str]:
    """The command of a process; none where it has just ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []
