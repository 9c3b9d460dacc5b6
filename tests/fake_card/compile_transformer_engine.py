# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Compiles Transformer Engine's extension for torch without NVIDIA's compiler, for the fake card.

python3.12 -m tests.fake_card.compile_transformer_engine FOLDER; FOLDER is the environment that `install` has made. The
extension has no CUDA sources. Its headers come from NVIDIA's packages, whose libraries are not installed.
"""

import argparse
import os
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.fake_card.build import torch_folder
from tests.fake_card.environment import transformer_engine_folder
from tests.fake_card.install import Environment, NotThere

_EXTENSION = "transformer_engine_torch"
# With what they ask for, but for torch and for what the environment has: else pip would install NVIDIA's libraries.
_ENGINE = (
    *("transformer_engine", "transformer_engine_cu13", "einops", "importlib-metadata", "ml-dtypes", "nvdlfw-inspect"),
    *("onnx", "onnx-ir", "onnxscript", "zipp"),
)
_BUILD_TOOLS = ("pybind11", "wheel")
_WITH_HEADERS = (
    *("nvidia-cublas", "nvidia-cuda-cccl", "nvidia-cudnn-cu13", "nvidia-cusolver", "nvidia-cusparse"),
    *("nvidia-cuda-nvrtc", "nvidia-nccl-cu13", "nvidia-nvtx"),
)
# As in the extension's own setup, but without optimization: nothing that it computes matters here.
_FLAGS = (
    *("-std=c++20", "-O0", "-g0", "-w", "-fPIC", "-fvisibility=hidden"),
    *("-DTORCH_API_INCLUDE_EXTENSION_H", f"-DTORCH_EXTENSION_NAME={_EXTENSION}", "-DNVTE_WITH_NCCL_EP", "-DUSE_NCCL"),
)
_LINKED = ("torch", "torch_python", "torch_cuda", "torch_cpu", "c10", "c10_cuda")


def extract_headers(wheels: Path, target: Path) -> None:
    """Extract the headers of wheels, and none of their libraries."""
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(target, [name for name in archive.namelist() if "/include/" in name])


def compile_extension(sources: Path, headers: Path, target: Path) -> None:
    """Compile the sources into a shared library.

    Args:
        sources: Extracted source archive.
        target: The library's file.

    Raises:
        SystemExit: A file does not compile. The compiler's message is on standard error.
    """
    torch, nvidia, common = torch_folder(), headers / "nvidia", sources / "common_headers"
    # In the order of the extension's own setup, as two headers have one name.
    folders = [
        *(nvidia / "cu13" / "include", nvidia / "cu13" / "include" / "cccl"),
        *(nvidia / "cudnn" / "include", nvidia / "nccl" / "include"),
        *(common, common / "common", common / "common" / "include", sources / "csrc"),
        *(torch / "include", torch / "include" / "torch" / "csrc" / "api" / "include"),
        Path(sysconfig.get_path("include")),
    ]
    flags = [*_FLAGS, *(f"-I{folder}" for folder in folders)]
    objects = sources / "objects"
    objects.mkdir(exist_ok=True)
    # All files include torch, which takes longer than the rest of a file.
    header = objects / "all.h"
    header.write_text('#include "extensions.h"\n', encoding="utf-8")
    _compile([*flags, "-x", "c++-header", str(header), "-o", f"{header}.gch"])

    def compiled(file: Path) -> str:
        made = objects / "_".join(file.relative_to(sources / "csrc").with_suffix(".o").parts)
        _compile([*flags, "-include", str(header), "-c", str(file), "-o", str(made)])
        return str(made)

    files = sorted((sources / "csrc").rglob("*.cpp"), key=lambda file: -file.stat().st_size)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        made = list(threads.map(compiled, files))
    libraries = [f"-L{torch / 'lib'}", *(f"-l{name}" for name in _LINKED)]
    _compile(["-shared", "-o", str(target), *made, *libraries])


def _compile(arguments: Sequence[str]) -> None:
    if subprocess.run(["g++", *arguments], check=False).returncode:
        raise SystemExit(f"[fake-card] error: g++ does not compile {_EXTENSION}")


def main() -> int:
    """Read the command line and compile; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fake_card.compile_transformer_engine", description=__doc__)
    parser.add_argument("folder", type=Path)
    folder, began = parser.parse_args().folder.resolve(), time.monotonic()
    environment, target = Environment(folder), transformer_engine_folder(folder)
    headers = folder / "headers"
    with tempfile.TemporaryDirectory(prefix="fake_card_", dir=folder) as scratch:
        wheels, archive = Path(scratch) / "wheels", Path(scratch) / "source"
        try:
            environment.pip("install", "--no-deps", *_BUILD_TOOLS)
            environment.pip("install", "--no-deps", "--upgrade", "--target", str(target), *_ENGINE)
            environment.pip("download", "--no-deps", "--only-binary=:all:", "--dest", str(wheels), *_WITH_HEADERS)
            source = ("--no-deps", "--no-build-isolation", "--no-binary", _EXTENSION, "--dest", str(archive))
            environment.pip("download", *source, _EXTENSION)
        except NotThere as error:
            print(f"[fake-card] error: pip does not get Transformer Engine or its headers: {error}", file=sys.stderr)
            return 2
        extract_headers(wheels, headers)
        (packed,) = archive.glob("*.tar.gz")
        with tarfile.open(packed) as found:
            found.extractall(scratch, filter="data")
        compile_extension(Path(scratch) / packed.name.removesuffix(".tar.gz"), headers, target / f"{_EXTENSION}.so")
    print(f"[fake-card] Transformer Engine was compiled in {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
