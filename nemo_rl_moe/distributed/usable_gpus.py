# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Check that torch can use a machine's GPUs. Ray assigns all GPUs, also ones that torch cannot use."""

import os
import re
import socket
import subprocess
from contextlib import suppress
from pathlib import Path

from nemo_rl_moe.errors import one_line

LOWEST_DRIVER = {12: 525, 13: 580}
"""Major version of a CUDA release -> oldest branch of NVIDIA's driver for it."""

_KERNEL_MODULE = Path("/proc/driver/nvidia/version")
_QUERY = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def installed_driver() -> str | None:
    """Return the version of this machine's NVIDIA driver, if it has one."""
    with suppress(OSError):
        if found := re.search(r"\s(\d{3,}(?:\.\d+)+)\s", _KERNEL_MODULE.read_text().partition("\n")[0] + " "):
            return found[1]
    with suppress(OSError, subprocess.SubprocessError):
        answer = subprocess.run(_QUERY, capture_output=True, text=True, check=True, timeout=60).stdout
        if found := re.match(r"\s*(\d{3,}(?:\.\d+)+)\s", answer):
            return found[1]
    return None


def problem_with_driver(cuda: str, driver: str | None) -> str | None:
    """Return why a driver cannot run builds for a CUDA release, such as `13.0`. None if it can."""
    lowest = LOWEST_DRIVER.get(int(cuda.partition(".")[0]))
    needed = f"CUDA {cuda} needs NVIDIA's driver" + (f" {lowest} or newer" if lowest else "")
    if driver is None:
        return f"{needed}, and this machine has none"
    if lowest and int(driver.partition(".")[0]) < lowest:
        return f"{needed}, and this machine has {driver}"
    return None


def problem_with_gpus() -> str | None:
    """Return one line on why torch cannot use the GPUs in CUDA_VISIBLE_DEVICES. None if it can."""
    import torch

    if torch.cuda.is_available():
        return None
    driver = installed_driver()
    if torch.version.cuda is None:
        why = f"torch {torch.__version__} is a build for CPUs (NVIDIA's driver here: {driver or 'none'})"
        cure = "install its build for CUDA (make gpu)"
    else:
        why = f"torch {torch.__version__} is built for CUDA: " + (
            problem_with_driver(torch.version.cuda, driver) or f"with NVIDIA's driver {driver} {_reason_of_torch()}"
        )
        cure = "install another driver, or a torch that is built for this one"
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return (
        f"cluster.gpus_per_node: Ray has given the GPUs {gpus} of {socket.gethostname()} to this run, but torch cannot"
        f" use them: {why}; {cure}; nearest: cluster.gpus_per_node=0, which trains on CPUs"
    )


def _reason_of_torch() -> str:
    import torch

    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return f"it finds no device ({one_line(error)})"
    return "it finds no device"
