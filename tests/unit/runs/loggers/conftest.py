# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What the logger tests share: no test may depend on, or touch, the accounts of whoever runs it."""

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_rl_moe.runs.loggers.mlflow import MlflowLogger, local_store_uri


@pytest.fixture(scope="session")
def empty_mlflow_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `mlflow.db` with all of its tables, to be copied: making them takes MLflow seconds."""
    folder = tmp_path_factory.mktemp("mlflow")
    MlflowLogger(local_store_uri(folder), "another", None).close()
    return folder / "mlflow.db"


@pytest.fixture
def run_folder(tmp_path: Path, empty_mlflow_store: Path) -> Path:
    """A run's folder. The folder above its parent has an MLflow store without runs."""
    folder = tmp_path / "sft" / "exp_001"
    folder.mkdir(parents=True)
    shutil.copy(empty_mlflow_store, tmp_path)
    return folder


@pytest.fixture(autouse=True)
def nobody_logged_in(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder without credentials, and an environment without W&B and MLflow settings."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    for name in ("WANDB_DIR", "WANDB_RUN_ID", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    return home


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Closed; opened at the end, so that no thread stays behind."""
    gate = threading.Event()
    yield gate
    gate.set()
