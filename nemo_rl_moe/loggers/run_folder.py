# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The numbered folder that holds everything a run writes, and the files that say what ran."""

import importlib.metadata
import json
import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

import nemo_rl_moe
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.loggers.git_state import read_git_state
from nemo_rl_moe.loggers.plain import to_plain

_FOLDER_PATTERN = re.compile(r"exp_(\d+)")
_FILE_STEM_PATTERN = re.compile(r"[A-Za-z0-9_-]+")
_OWN_FILES = frozenset({"config", "versions", "git"})
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


def create_run_folder(log_dir: str | Path) -> Path:
    """Makes the next free `exp_001`, `exp_002`, ... in a log folder, which is created where needed.

    Two processes that call this at the same moment get two folders.

    Returns:
        The new, empty folder.

    Raises:
        ConfigurationError: The folder cannot be made there.
    """
    parent = Path(log_dir)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        taken = [int(match[1]) for entry in parent.iterdir() if (match := _FOLDER_PATTERN.fullmatch(entry.name))]
        number = max(taken, default=0) + 1
        while True:
            folder = parent / f"exp_{number:03d}"
            try:
                # Of all processes that try, the operating system lets exactly one make the folder.
                folder.mkdir()
                return folder
            except FileExistsError:
                number += 1
    except OSError as error:
        raise ConfigurationError(
            f"logger.log_dir: {str(log_dir)!r} cannot hold the run's folder: {error.strerror}; "
            "it needs to be a folder that you may write to"
        ) from error


def write_run_files(folder: Path, resolved_config: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
    """Writes what a reader needs to know what ran and to run it again.

    `config.yaml` is the resolved configuration, `versions.json` the versions of Python and of the packages, `git.json`
    the state of the git checkout around the working directory.

    Args:
        folder: The run's folder.
        resolved_config: The nested configuration, nothing left to resolve.
        extra: More to keep: name to content, each written as `<name>.json`.

    Raises:
        ValueError: A name in `extra` is not a plain file name, or is one of the three above.
    """
    for name in extra:
        if not _FILE_STEM_PATTERN.fullmatch(name) or name in _OWN_FILES:
            raise ValueError(f"{name!r} cannot name a file of the run: letters, digits, _, -; not {sorted(_OWN_FILES)}")
    text = yaml.safe_dump(to_plain(resolved_config), sort_keys=False, allow_unicode=True)
    (folder / "config.yaml").write_text(text, encoding="utf-8")
    _write_json(folder / "versions.json", collect_versions())
    _write_json(folder / "git.json", read_git_state(Path.cwd()))
    for name, content in extra.items():
        _write_json(folder / f"{name}.json", content)


def collect_versions() -> dict[str, Any]:
    """Python, the platform and the packages that shape a run's numbers; None for a package that is not installed."""
    return {
        "nemo_rl_moe": nemo_rl_moe.__version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "packages": {name: _package_version(name) for name in _PACKAGES},
    }


def _package_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(to_plain(content), indent=2) + "\n", encoding="utf-8")
