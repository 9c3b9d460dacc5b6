# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Compilation of Transformer Engine against the installed torch, and the check that both still match.

`make gpu` runs this module. The extension for torch is only released as sources. pip installs NVIDIA's compiler and
headers for the CUDA release of torch. An installed CUDA toolkit is neither needed nor used, as its cuDNN may differ
from torch's.
"""

import argparse
import importlib
import importlib.metadata
import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from email.parser import HeaderParser
from pathlib import Path

from nemo_rl_moe.distributed.usable_gpus import installed_driver, problem_with_driver
from nemo_rl_moe.errors import EXIT_BAD_INPUT, EXIT_RUN_FAILED, one_line, report_error

CUDA = "13"
"""Major version of CUDA of the compiler's packages. It must be that of torch."""
BUILD_TOOLS = ("ninja", "packaging", "pybind11", "setuptools", "wheel")
COMPILER = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-cuda-cccl")
ENGINE = f"transformer-engine[core_cu{CUDA},pytorch]"
EXTENSION = "transformer-engine-torch"
REPAIR = "compile it anew: make gpu"

_BUILD_PREFIX = "0_torch_"
"""Prefix of the wheel's build number. The number must begin with a digit, and records the version of torch."""


def build_environment(environment: Mapping[str, str], site_packages: Path) -> dict[str, str]:
    nvidia = site_packages / "nvidia"
    toolkit = nvidia / f"cu{CUDA}"
    # If Transformer Engine finds a compiler, it does not look for headers in other packages.
    headers = [str(nvidia / package / "include") for package in ("cudnn", "nccl")]
    return {
        **environment,
        "CUDA_HOME": str(toolkit),
        "PATH": os.pathsep.join([str(toolkit / "bin"), environment.get("PATH", os.defpath)]),
        "CPATH": os.pathsep.join([*headers, *filter(None, [environment.get("CPATH")])]),
        # Otherwise Transformer Engine first looks for a wheel on the internet.
        "NVTE_PYTORCH_FORCE_BUILD": "TRUE",
    }


def compile_command(pip: Sequence[str], limits: Sequence[str], torch_version: str) -> list[str]:
    """Return pip's call that compiles and installs Transformer Engine, and records the version of torch."""
    note = f"--config-settings=--build-option=--build-number={_BUILD_PREFIX}{torch_version}"
    # pip's cache may contain an extension that was compiled for another torch.
    return [*pip, "install", "--no-build-isolation", "--no-cache-dir", note, *limits, ENGINE]


def torch_of_extension() -> str | None:
    """Return the version of torch that the installed extension was compiled for, if that is known."""
    try:
        text = importlib.metadata.distribution(EXTENSION).read_text("WHEEL")
    except importlib.metadata.PackageNotFoundError:
        return None
    build = HeaderParser().parsestr(text or "").get("Build", "")
    return build.removeprefix(_BUILD_PREFIX) if build.startswith(_BUILD_PREFIX) else None


def problem_with_extension() -> str | None:
    """Return why the installed Transformer Engine cannot be used with the installed torch. None if it can.

    Without this check, Megatron-Core treats an extension that does not load as not installed, and fails in the first
    layer with experts.
    """
    import torch

    compiled_for = torch_of_extension()
    if compiled_for not in (None, torch.__version__):
        return f"Transformer Engine was compiled for torch {compiled_for}, found torch {torch.__version__}; {REPAIR}"
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:
        return f"Transformer Engine does not load with torch {torch.__version__} ({one_line(error)}); {REPAIR}"
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compile Transformer Engine against the torch that is installed.")
    parser.add_argument("--constraint", type=Path, help="pip constraints file that fixes the releases of packages")
    parsed = parser.parse_args(arguments)
    import torch

    if torch.version.cuda is None or torch.version.cuda.partition(".")[0] != CUDA:
        report_error(
            f"torch {torch.__version__} is no build for CUDA {CUDA}, which Transformer Engine is compiled for here;"
            " in an environment with the build for CPUs: make clean, then make gpu"
        )
        return EXIT_BAD_INPUT
    driver = installed_driver()
    # An image for machines with GPUs may be built on one without a driver. With CUDA's compatibility packages, torch
    # can use some older drivers.
    is_usable = driver is None or torch.cuda.is_available()
    if not is_usable and (problem := problem_with_driver(torch.version.cuda, driver)):
        report_error(f"torch {torch.__version__} cannot use the GPUs of this machine: {problem}")
        return EXIT_BAD_INPUT
    limits = ["--constraint", str(parsed.constraint)] if parsed.constraint else []
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input"]
    environment = build_environment(os.environ, Path(sysconfig.get_path("purelib")))
    print("[gpu] 1/2: the compiler and headers of CUDA", flush=True)
    subprocess.run([*pip, "install", *limits, *BUILD_TOOLS, *COMPILER], check=True)
    if torch_of_extension() != torch.__version__:
        subprocess.run([*pip, "uninstall", "--yes", EXTENSION], check=True)
    print(f"[gpu] 2/2: Transformer Engine for torch {torch.__version__} (compiles for many minutes)", flush=True)
    subprocess.run(compile_command(pip, limits, torch.__version__), check=True, env=environment)
    if driver is None:
        print("[gpu] Transformer Engine is installed, but not tested: this machine has no NVIDIA driver", flush=True)
    elif problem := problem_with_extension():
        report_error(problem)
        return EXIT_RUN_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
