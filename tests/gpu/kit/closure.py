# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Packages of the checks of one GPU, by the metadata of what is installed here; and a folder with these alone."""

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

IMPORTED = ("einops", "jaxtyping", "megatron-core", "omegaconf", "psutil", "pydantic", "xxhash")
"""What this project and the checks import there, beside the next ones."""
ON_THE_MACHINE = ("torch", "transformers")
"""Taken to be there, with what they require."""
# With what they require: what other releases of transformers do not may be missing there.
_NOT_CARRIED = ("torch", "numpy", "packaging", "pyyaml")


def with_requirements(names: Iterable[str]) -> set[str]:
    """Return packages with all that they require, without their extras."""
    found: set[str] = set()
    waiting = list(map(canonicalize_name, names))
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        try:
            asked = [Requirement(text) for text in distribution(name).requires or ()]
        except PackageNotFoundError:  # of torch's builds for CUDA
            continue
        found.add(name)
        waiting += [canonicalize_name(each.name) for each in asked if each.marker is None or each.marker.evaluate()]
    return found


def carried() -> list[str]:
    """Return the packages that the kit brings."""
    return sorted(with_requirements(IMPORTED) - with_requirements(_NOT_CARRIED))


def link_packages(folder: Path) -> None:
    """Fill a folder with links to what the machine has and what the kit brings, for a Python that sees nothing else."""
    for name in with_requirements((*IMPORTED, *ON_THE_MACHINE)):
        found = distribution(name)
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            link = folder / top
            if not link.exists():
                link.symlink_to(Path(str(found.locate_file(top))))
