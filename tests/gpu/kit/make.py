# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Make the kit: what the checks of one GPU need on a machine without a package index that has torch and transformers.

The folder holds wheels, of which Transformer Engine's has device code for few architectures, the sources of Transformer
Engine's extension and build_te.sh, which compiles them for one torch. Carry it with the repository; there
`python -m tests.gpu.calls` installs and uses it. Example: a kit for H100 and H200, then one for A100 too:

  python -m tests.gpu.kit.make
  python -m tests.gpu.kit.make --architectures 80 90
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_rl_moe.atomic_writes import delete
from nemo_rl_moe.errors import EXIT_BAD_INPUT, UserError, report_error
from tests.gpu.kit.closure import carried
from tests.gpu.kit.fatbin import NotALibrary
from tests.gpu.kit.fetching import fetch_sources, fetch_wheels
from tests.gpu.kit.pins import pins
from tests.gpu.kit.slim_wheel import slim

REPOSITORY = Path(__file__).resolve().parents[3]
ENGINE, LIBRARY, EXTENSION = "transformer-engine", "transformer-engine-cu13", "transformer-engine-torch"
BUILD_SCRIPT = Path(__file__).with_name("build_te.sh")
FACTS = "kit.json"
LARGEST_MB = 60
_MB = 1e6


@dataclass(frozen=True)
class Target:
    """The machine that the kit is for.

    Attributes:
        python: Release of its Python.
        machine: Its processor, as `uname -m` has it.
        architectures: Of its cards: 90 for H100 and H200.
        also: More packages, each `NAME==RELEASE`.
    """

    python: str
    machine: str
    architectures: tuple[int, ...]
    also: tuple[str, ...] = ()


def requirements(target: Target) -> list[str]:
    """Return what is fetched as it is, in the releases of constraints-gpu.txt."""
    releases = pins(REPOSITORY / "constraints-gpu.txt", target.python)
    return [f"{name}=={releases[name]}" for name in (*carried(), ENGINE)] + list(target.also)


def make_kit(target: Target, folder: Path) -> int:
    """Make the folder, or leave the one that is there as it is.

    Returns:
        Its size in bytes.

    Raises:
        UserError: A package cannot be had, has no code for an architecture, or all are too large together.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}.partial_") as scratch:
        staging = Path(scratch, "kit")
        staging.mkdir()
        _fill(target, staging, Path(scratch))
        size = sum(path.stat().st_size for path in staging.rglob("*"))
        if size > LARGEST_MB * _MB:
            raise UserError(f"the kit has {size / _MB:.1f} MB, more than {LARGEST_MB}; name fewer architectures")
        delete(folder)
        staging.rename(folder)
    return size


def _fill(target: Target, staging: Path, scratch: Path) -> None:
    wheels = staging / "wheels"
    wheels.mkdir()
    release = pins(REPOSITORY / "constraints-gpu.txt", target.python)[LIBRARY]
    wanted = requirements(target)
    _say(f"1/3: {len(wanted)} wheels for Python {target.python}")
    fetch_wheels(wanted, wheels, target.python, target.machine)
    _say(f"2/3: Transformer Engine {release} (245 MB), cut down to sm_{', sm_'.join(map(str, target.architectures))}")
    fetch_wheels([f"{LIBRARY}=={release}"], scratch, target.python, target.machine)
    (library,) = scratch.glob("*.whl")
    try:
        found = slim(library, wheels / library.name, target.architectures)
    except NotALibrary as error:
        raise UserError(f"{library.name}: {error}") from error
    kept = sum(found[each] for each in target.architectures)
    _say(f"  {kept / _MB:.0f} of {sum(found.values()) / _MB:.0f} MB of device code are kept")
    _say("3/3: the sources of its extension for torch")
    fetch_sources(f"{EXTENSION}=={release}", staging)
    shutil.copy(BUILD_SCRIPT, staging)
    facts = {"python": target.python, "architectures": target.architectures, "transformer_engine": release}
    (staging / FACTS).write_text(json.dumps(facts) + "\n", encoding="utf-8")


def _say(line: str) -> None:
    print(f"[gpu-kit] {line}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line and make the kit; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu.kit.make", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=REPOSITORY / ".gpu", help="the folder to make (.gpu)")
    parser.add_argument("--python", default="3.12", help="release of the machine's Python (3.12)")
    parser.add_argument("--machine", default="x86_64", help="its processor, as `uname -m` prints it (x86_64)")
    parser.add_argument(
        "--architectures", nargs="+", type=int, default=[90], metavar="N", help="compute capabilities times ten (90)"
    )
    parser.add_argument(
        "--also", nargs="+", default=[], metavar="NAME==RELEASE", help="packages that the machine lacks beside these"
    )
    options = parser.parse_args(arguments)
    target = Target(options.python, options.machine, tuple(sorted(set(options.architectures))), tuple(options.also))
    try:
        size = make_kit(target, options.output)
    except UserError as error:
        report_error(error)
        return EXIT_BAD_INPUT
    _say(f"{options.output}: {size / _MB:.1f} MB. Compile its extension where the machine's torch is: build_te.sh")
    return 0


if __name__ == "__main__":
    sys.exit(main())
