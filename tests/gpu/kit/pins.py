# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Releases of packages, read from a constraints file for a Python that need not be this one."""

from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def pins(file: Path, python: str) -> dict[str, str]:
    """Return the releases of a constraints file by the package's canonical name.

    Args:
        file: Each of its lines is empty, a comment or `NAME==RELEASE`, perhaps with a marker.
        python: Release of Python that markers are evaluated for, such as `3.12`.
    """
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    found: dict[str, str] = {}
    for requirement in map(Requirement, lines):
        if requirement.marker is None or requirement.marker.evaluate({"python_version": python}):
            name = canonicalize_name(requirement.name)
            assert name not in found, f"{name} is pinned twice"
            ((pin),) = requirement.specifier
            assert pin.operator == "=="
            found[name] = pin.version
    return found
