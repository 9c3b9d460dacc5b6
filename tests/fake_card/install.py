# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Makes the environment of the fake card: torch for CUDA without NVIDIA's packages, and what the tests need.

python3.12 -m tests.fake_card.install FOLDER; in the releases of constraints-gpu.txt. Without torch or CUDA's headers
it ends with an error. Without the packages for training it goes on: the tests that need one of them are skipped.
With --vllm it adds vLLM.
"""

import argparse
import re
import shlex
import subprocess
import sys
import time
import venv
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
HEADERS = ("nvidia-cuda-runtime", "nvidia-cuda-crt")
_OF_TESTS = ("hypothesis", "pytest", "pytest-timeout", "pytest-xdist")
_OF_NVIDIA = re.compile(r"Requires-Dist: (cuda-toolkit|nvidia-)")


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
        """Install torch and CUDA's headers. Packages of NVIDIA's are no longer among those that torch asks for."""
        self.pip("install", "--no-deps", *self._torch_arguments, "torch")
        (metadata,) = self.folder.glob("lib/python*/site-packages/torch-*.dist-info/METADATA")
        lines = metadata.read_text(encoding="utf-8").splitlines(keepends=True)
        metadata.write_text("".join(line for line in lines if not _OF_NVIDIA.match(line)), encoding="utf-8")
        self.pip("install", "--no-deps", "--target", str(self.folder / "headers"), *HEADERS)
        self.pip("install", "torch", *_OF_TESTS)

    def install_training(self) -> None:
        """Install this project with what it needs for training."""
        self.pip("install", "--editable", f"{REPOSITORY}[train]")

    def install_vllm(self) -> None:
        """Install vLLM for CUDA, and what a run with it needs. Copies of NVIDIA's libraries are replaced by a build."""
        self.pip("install", "--editable", f"{REPOSITORY}[train,environments,vllm]")

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
    parser.add_argument("--vllm", action="store_true", help="add vLLM to an environment that is there")
    options = parser.parse_args()
    environment, began = Environment(options.folder, options.torch_arguments), time.monotonic()
    if options.vllm:
        try:
            environment.install_vllm()
        except NotThere as error:
            print(f"[fake-card] error: pip does not get vLLM: {error}", file=sys.stderr)
            return 2
        print(f"[fake-card] vLLM installed in {time.monotonic() - began:.0f} s")
        return 0
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
