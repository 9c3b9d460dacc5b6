# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What keeps torch from a machine's GPUs, by the driver that is there and the CUDA release that torch is built for."""

import os
from pathlib import Path

import pytest
import torch

from nemo_rl_moe.distributed import usable_gpus
from nemo_rl_moe.distributed.usable_gpus import installed_driver, problem_with_driver, problem_with_gpus

MODULES = {
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC": "535.104.05",
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build  (a@b)\n": "580.82.07",
    "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  595.10\n": "595.10",
}


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Take away the driver; returns the folder of the file in which its kernel module would say its version."""
    monkeypatch.setattr(usable_gpus, "_KERNEL_MODULE", tmp_path / "version")
    monkeypatch.setattr(usable_gpus, "_QUERY", (str(tmp_path / "nvidia-smi"),))
    return tmp_path


@pytest.mark.parametrize("text", MODULES)
def test_the_kernel_module_says_its_version(text: str, no_driver: Path) -> None:
    (no_driver / "version").write_text(text)
    assert installed_driver() == MODULES[text]


def test_else_the_drivers_program_does(no_driver: Path) -> None:
    assert installed_driver() is None
    program = no_driver / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 550.54.15\necho 550.54.15\n")
    program.chmod(0o755)
    assert installed_driver() == "550.54.15"
    program.write_text("#!/bin/sh\necho it has failed\nexit 9\n")
    assert installed_driver() is None


@pytest.mark.parametrize(
    ("cuda", "driver", "problem"),
    [
        ("13.0", "580.65.06", None),
        ("13.0", "550.54.15", "CUDA 13.0 needs NVIDIA's driver 580 or newer, and this machine has 550.54.15"),
        ("12.6", "535.104.05", None),
        ("12.6", "470.1", "CUDA 12.6 needs NVIDIA's driver 525 or newer, and this machine has 470.1"),
        ("13.0", None, "CUDA 13.0 needs NVIDIA's driver 580 or newer, and this machine has none"),
        ("14.1", "580.1", None),
        ("14.1", None, "CUDA 14.1 needs NVIDIA's driver, and this machine has none"),
    ],
)
def test_a_driver_may_be_too_old(cuda: str, driver: str | None, problem: str | None) -> None:
    assert problem_with_driver(cuda, driver) == problem


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has an accelerator")
def test_the_line_names_gpus_builds_and_driver(no_driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    (no_driver / "version").write_text(next(iter(MODULES)))
    start = f"cluster.gpus_per_node: Ray has given the GPUs 0,1 of {os.uname().nodename} to this run, but torch cannot"
    end = "; nearest: cluster.gpus_per_node=0, which trains on CPUs"
    found = {}
    for cuda in (None, "13.0", "12.6"):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        line = problem_with_gpus()
        assert line is not None
        assert (line.startswith(start), line.endswith(end), "\n" in line) == (True, True, False)
        found[cuda] = line.removeprefix(start).removesuffix(end)
    build = f" use them: torch {torch.__version__} is"
    cure = "; install another driver, or a torch that is built for this one"
    assert found[None] == (
        f"{build} a build for CPUs (NVIDIA's driver here: 535.104.05); install its build for CUDA (make gpu)"
    )
    assert found["13.0"] == (
        f"{build} built for CUDA: CUDA 13.0 needs NVIDIA's driver 580 or newer, and this machine has 535.104.05{cure}"
    )
    assert found["12.6"].startswith(f"{build} built for CUDA: with NVIDIA's driver 535.104.05 it finds no device (")
