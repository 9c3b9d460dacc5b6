# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What all tests share: an environment that depends on neither the machine nor the user, and the markers by folder."""

import importlib.metadata
import os
import socket
from pathlib import Path

import pytest

REPOSITORY_ROOT = Path(__file__).resolve().parents[1]

# Set while pytest collects, before any test module imports torch, transformers or Ray, and inherited by processes that
# tests start. One thread each: several ranks share the machine, and more threads would change the order of sums.
os.environ.update(
    OMP_NUM_THREADS="1",
    MKL_NUM_THREADS="1",
    OPENBLAS_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    WANDB_MODE="offline",
    RAY_USAGE_STATS_ENABLED="0",
)

_FOLDERS_WITH_MEGATRON = (
    REPOSITORY_ROOT / "tests" / "unit" / "models" / "megatron",
    REPOSITORY_ROOT / "tests" / "functional",
)
_FOLDER_OF_REAL_RUNS = REPOSITORY_ROOT / "tests" / "functional"


def pytest_report_header() -> str:
    """Names the release that this pass tests: `make test` makes two passes, on different ones."""
    return f"megatron-core: {importlib.metadata.version('megatron-core')}"


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks tests by the folder they lie in, so that no file can be forgotten."""
    for item in items:
        if any(item.path.is_relative_to(folder) for folder in _FOLDERS_WITH_MEGATRON):
            item.add_marker(pytest.mark.megatron)
        if item.path.is_relative_to(_FOLDER_OF_REAL_RUNS):
            item.add_marker(pytest.mark.functional)


@pytest.fixture(scope="session")
def repository_root() -> Path:
    """The folder with `pyproject.toml`."""
    return REPOSITORY_ROOT


@pytest.fixture
def free_port() -> int:
    """A TCP port of this machine that nothing listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
