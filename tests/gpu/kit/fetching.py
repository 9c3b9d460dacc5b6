# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Packages for another machine, fetched by pip: wheels for its Python, and sources that pip does not build."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from nemo_rl_moe.errors import UserError

_PIP = (sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input", "--no-deps")
_NEWEST_GLIBC, _OLDEST_GLIBC = 39, 17

# pip runs the sources' setup.py to learn their name, and that asks for a torch and a compiler of CUDA.
_ANSWERS: Mapping[str, str] = {
    "torch/__init__.py": "class version:\n    cuda = '13.0'\n",
    "torch/utils/__init__.py": "",
    "torch/utils/cpp_extension.py": (
        "import setuptools\n"
        "from setuptools.command.build_ext import build_ext as BuildExtension\n"
        "def CppExtension(name, sources, **_):\n    return setuptools.Extension(name, sources)\n"
    ),
    "toolkit/include/cuda.h": "",
    "toolkit/bin/nvcc": "#!/bin/sh\necho release 13.0\n",
}


class NotFetched(UserError):
    """What pip cannot get; says which package."""


def fetch_wheels(requirements: Sequence[str], folder: Path, python: str, machine: str) -> None:
    """Fetch wheels for a release of Python on Linux, without what they require.

    Raises:
        NotFetched: pip has none of one of them.
    """
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in range(_NEWEST_GLIBC, _OLDEST_GLIBC - 1, -1)]
    options = ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}"]
    options += [f"--platform={name}" for name in (*platforms, f"manylinux2014_{machine}")]
    _download(requirements, folder, options, os.environ)


def fetch_sources(requirement: str, folder: Path) -> None:
    """Fetch the sources of Transformer Engine's extension.

    Raises:
        NotFetched: pip has none.
    """
    with tempfile.TemporaryDirectory(prefix="answers_") as answers:
        for name, text in _ANSWERS.items():
            path = Path(answers, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            path.chmod(0o755)
        environment = os.environ | {"PYTHONPATH": answers, "CUDA_HOME": f"{answers}/toolkit"}
        _download([requirement], folder, ["--no-binary=:all:", "--no-build-isolation"], environment)


def _download(
    requirements: Sequence[str], folder: Path, options: Sequence[str], environment: Mapping[str, str]
) -> None:
    command = [*_PIP, "--dest", str(folder), *options, *requirements]
    found = subprocess.run(command, check=False, env=dict(environment), capture_output=True, text=True)
    if found.returncode != 0:
        said = [line.strip() for line in found.stderr.splitlines() if line.lower().startswith("error")]
        raise NotFetched(f"pip download: {said[-1].partition(': ')[2] if said else 'failed without a reason'}")
