# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Packages that the checks of one GPU import beside those that the machine is taken to have.

`python -m tests.gpu.kit.closure` rehearses the checks on CPUs, one after the other in one process, and prints their
names: `CARRIED` of make.py. What Transformer Engine alone imports is not among them: onnxscript, einops, packaging.
"""

import importlib
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, packages_distributions, requires

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.gpu.run import CHECKS

ON_THE_MACHINE = ("torch", "transformers", "einops", "psutil", "pyarrow", "xxhash")
"""With what they require."""
_NEITHER = ("nemo-rl-moe", "pip", "setuptools", "wheel")


def with_requirements(names: Iterable[str]) -> set[str]:
    """Return packages with all that they require, as installed here, without their extras."""
    found: set[str] = set()
    waiting = list(map(canonicalize_name, names))
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        try:
            asked = [Requirement(text) for text in requires(name) or ()]
        except PackageNotFoundError:  # of another platform
            continue
        waiting += [canonicalize_name(each.name) for each in asked if each.marker is None or each.marker.evaluate()]
    return found


def imported() -> set[str]:
    """Return the packages of all modules that this process has imported."""
    owners = packages_distributions()
    tops = {name.partition(".")[0] for name in sys.modules}
    return {canonicalize_name(owner) for top in tops for owner in owners.get(top, ())}


def main() -> int:
    """Rehearse and print; return the exit code."""
    for check in CHECKS:
        if "vllm" in check.needs:
            continue
        print(f"[closure] {check.name}", file=sys.stderr, flush=True)
        module, _, name = check.function.partition(":")
        list(getattr(importlib.import_module(module), name)(rehearse=True))
    print(*sorted(imported() - with_requirements(ON_THE_MACHINE) - set(_NEITHER)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
