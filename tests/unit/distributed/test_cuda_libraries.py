# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine gets torch's CUDA libraries, also on a machine with a toolkit."""

import ctypes
import os
from pathlib import Path

import pytest

from nemo_rl_moe.distributed.cuda_libraries import prefer_libraries_of_torch

VARIABLES = ("CUDNN_HOME", "NVRTC_HOME", "CURAND_HOME")


def test_the_packages_of_torch_come_before_a_toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"CUDA_HOME": "/usr/local/cuda", "CURAND_HOME": "/chosen"})
    loaded: list[str] = []
    monkeypatch.setattr(ctypes, "CDLL", lambda path, mode: loaded.append(Path(path).name))
    for name in ("cu13/lib/libnvrtc.so.13", "cu13/lib/libcurand.so.10", "cudnn/lib/libcudnn.so.9"):
        (tmp_path / "nvidia" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "nvidia" / name).touch()
    (tmp_path / "nvidia/cudnn/lib/libcudnn_ops.so.9").touch()
    prefer_libraries_of_torch(tmp_path)
    nvidia = tmp_path / "nvidia"
    folders = [str(nvidia / "cudnn" / "lib"), str(nvidia / "cu13" / "lib"), "/chosen"]
    assert [os.environ[name] for name in VARIABLES] == folders
    assert loaded == ["libcudnn.so.9", "libcudnn_ops.so.9"]


def test_without_packages_nothing_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    prefer_libraries_of_torch(tmp_path)
    assert not os.environ
