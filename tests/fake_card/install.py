# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Makes the environment of the fake card: torch for CUDA without NVIDIA's packages, and what the tests need.

python3.12 -m tests.fake_card.install FOLDER; in the releases of constraints-gpu.txt. Without torch or CUDA's headers
it ends with an error. Without the packages for training it goes on: the tests that need one of them are skipped.
"""

import argparse
import re
import shlex
import subprocess
import sys
import time
import tomllib
import venv
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
HEADERS = ("nvidia-cuda-runtime", "nvidia-cuda-crt")
_OF_TORCH = ("filelock", "fsspec", "jinja2", "networkx", "numpy", "setuptools", "sympy", "typing-extensions")
_OF_TESTS = ("hypothesis", "pytest", "pytest-timeout")
# They ask for torch, and torch for NVIDIA's packages, so that they come without what they ask for.
_WITH_TORCH = ("megatron-core", "triton")


class NotThere(Exception):
    """What the index does not give, in a line."""


class Environment:
    """A virtual environment, and pip in it."""

    def __init__(self, folder: Path, torch_arguments: str = "") -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        self._torch_arguments = shlex.split(torch_arguments)

    def make(self) -> None:
        """Begin anew, as an editable installation may be of another folder."""
        if sys.version_info[:2] != (3, 12):
            raise SystemExit("[fake-card] error: needs Python 3.12: make test-fake-card FAKE_CARD_PYTHON=/path/to/it")
        venv.create(self.folder, with_pip=True, clear=True)

    def install_torch(self) -> None:
        """Install torch and CUDA's headers."""
        self.pip("install", "--no-deps", *self._torch_arguments, "torch")
        self.pip("install", "--no-deps", "--target", str(self.folder / "headers"), *HEADERS)
        self.pip("install", *_OF_TORCH, *_OF_TESTS)

    def install_training(self) -> None:
        """Install this project with what it needs for training."""
        project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        named = [*project["dependencies"], *project["optional-dependencies"]["train"]]
        others = [each for each in named if re.split("[^a-z-]", each)[0] not in ("torch", *_WITH_TORCH)]
        self.pip("install", *others)
        self.pip("install", "--no-deps", *_WITH_TORCH)
        self.pip("install", "--no-deps", "--editable", str(REPOSITORY))

    def pip(self, command: str, *arguments: str) -> None:
        """Run a command of pip, in the releases of constraints-gpu.txt.

        Raises:
            NotThere: It fails.
        """
        options = ("--quiet", "--disable-pip-version-check", "--no-input")
        constraint = ("--constraint", str(REPOSITORY / "constraints-gpu.txt"))
        called = [str(self.python), "-m", "pip", command, *options, *constraint, *arguments]
        result = subprocess.run(called, stderr=subprocess.PIPE, text=True, check=False)
        if result.returncode:
            errors = [line for line in result.stderr.splitlines() if line.startswith("ERROR")]
            raise NotThere(errors[-1] if errors else result.stderr[-500:])


def main() -> int:
    """Read the command line and install; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fake_card.install", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--torch-arguments", default="", help="more arguments for pip's installation of torch")
    options = parser.parse_args()
    environment, began = Environment(options.folder, options.torch_arguments), time.monotonic()
    environment.make()
    try:
        environment.install_torch()
    except NotThere as error:
        print(f"[fake-card] error: pip does not get torch for CUDA or its headers: {error}", file=sys.stderr)
        return 2
    missing = options.folder / "missing"
    missing.unlink(missing_ok=True)
    try:
        environment.install_training()
    except NotThere as error:
        missing.write_text(str(error), encoding="utf-8")
        print(f"[fake-card] tests of training will be skipped: {error}", file=sys.stderr)
    print(f"[fake-card] installed in {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
