# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Two commands that check and measure one GPU on a machine without a package index, in order of what they are worth.

  python3 -m tests.gpu.calls 1     9 minutes: speed and memory of the 8-GPU recipe, refits, state on the host, families
  python3 -m tests.gpu.calls 2     3 minutes: checkpoints, parity with CPUs, decoding, one long sequence

With three minutes for starts they fit into 15 minutes. Each installs the kit (.gpu, made by `make gpu-kit`) into
build/gpu/site and stops at its own limit. If the kit has no extension for this Python and torch, it is compiled first;
if that takes too long, the checks run with a stand-in for Transformer Engine. Results are JSON lines in
OUTPUT/results.jsonl; `python -m tests.gpu.table` makes rows of docs/gpu.md of them.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.gpu.run import REPOSITORY

STAND_IN = REPOSITORY / "tests/support/transformer_engine_stand_in"
SITE, BUILT = REPOSITORY / "build/gpu/site", REPOSITORY / "build/gpu/extension"
LONGEST_BUILD_S = 300.0
_POLL_S = 1.0


@dataclass(frozen=True)
class Call:
    """One of the commands.

    Attributes:
        limit_s: Seconds that it may take with all that it installs.
        checks: Of `CHECKS`.
    """

    limit_s: float
    checks: tuple[str, ...]


DEVICE_TIME_S, START_S = 900, 90
"""Time that a machine is lent for, all calls together, and the time that each start takes of it."""
CALLS = {
    1: Call(540, ("slice_step", "rank_share", "refit", "host_state", "families", "decode_fused", "sync")),
    2: Call(180, ("save_and_resume", "parity_with_cpu", "decode_auto", "decode_unfused", "tracking_cost", "long")),
}


class NotReady(Exception):
    """Something that the checks need is not there."""


def install(kit: Path, wheels: Sequence[Path]) -> None:
    """Install wheels into a folder of their own, without an index.

    Raises:
        NotReady: pip refuses; it has said why.
    """
    if not kit.is_dir():
        raise NotReady(f"there is no kit at {kit}: make gpu-kit makes it, and it is carried with the repository")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps"]
    done = subprocess.run([*pip, "--no-compile", "--upgrade", "--target", str(SITE), *map(str, wheels)], check=False)
    if done.returncode != 0:
        raise NotReady(f"the kit's wheels cannot be installed: made for another Python than {sys.version.split()[0]}?")


class Extension:
    """Transformer Engine's extension for this Python and torch: in the kit, or compiled here.

    Args:
        kit: Folder of the kit.
        log: File that gets what the compiler says.
    """

    def __init__(self, kit: Path, log: Path):
        import torch

        name = f"{torch.__version__}-cp{sys.version_info[0]}{sys.version_info[1]}"
        self._kit, self._log = kit, log
        self._places = [folder / name for folder in (kit / "extension", BUILT)]

    def wheel(self) -> Path | None:
        """Return the wheel, if it is there."""
        return next((path for place in self._places for path in place.glob("*.whl")), None)

    def start_build(self) -> None:
        """Start the compiler, where it neither has run nor runs; it goes on when this process has ended."""
        if self.wheel() is None and not any(BUILT.glob(".*")):
            with self._log.open("ab") as output:
                command = ["sh", str(self._kit / "build_te.sh"), sys.executable, str(BUILT)]
                subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)

    def wait(self, limit_s: float) -> Path:
        """Return the wheel when it has been compiled.

        Raises:
            NotReady: It does not come.
        """
        deadline = time.monotonic() + limit_s
        while (found := self.wheel()) is None:
            if time.monotonic() > deadline:
                raise NotReady(f"Transformer Engine's extension is not compiled after {limit_s:.0f} s: see {self._log}")
            time.sleep(_POLL_S)
        return found


def require_architecture(kit: Path) -> None:
    """Compare the card with the kit's device code.

    Raises:
        NotReady: The kit is for other cards.
    """
    import torch

    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        kept = json.loads((kit / "kit.json").read_text(encoding="utf-8"))["architectures"]
        if 10 * major + minor not in kept:
            raise NotReady(f"the kit is for sm_{kept}, this card is sm_{major}{minor}: make gpu-kit ARCHITECTURES=...")


def has_engine(kit: Path, log: Path) -> bool:
    """Install Transformer Engine's extension, compiled if need be; return whether it is there."""
    extension = Extension(kit, log)
    extension.start_build()
    try:
        install(kit, [extension.wait(LONGEST_BUILD_S)])
    except NotReady as problem:
        print(f"warning: {problem}; the checks run with a stand-in for it", file=sys.stderr, flush=True)
        return False
    return True


def run(call: Call, kit: Path, output: Path, *, rehearse: bool) -> int:
    """Install and check; return the exit code.

    Raises:
        NotReady: The kit is not there, or is for another machine.
    """
    began = time.monotonic()
    output.mkdir(parents=True, exist_ok=True)
    install(kit, sorted((kit / "wheels").glob("*.whl")))
    require_architecture(kit)
    path = [str(SITE), str(REPOSITORY)]
    if rehearse or not has_engine(kit, output / "build.log"):
        path.insert(0, str(STAND_IN))
    left_s = call.limit_s - (time.monotonic() - began)
    command = [sys.executable, "-m", "tests.gpu.run", "--only", *call.checks, "--limit", f"{left_s:.0f}"]
    command += ["--output", str(output), *(["--rehearse"] if rehearse else [])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
    return subprocess.run(command, cwd=REPOSITORY, env=environment, check=False).returncode


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line and run one of the calls; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python3 -m tests.gpu.calls",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("call", type=int, choices=sorted(CALLS), help="which")
    parser.add_argument("--kit", type=Path, default=REPOSITORY / ".gpu", help="folder of the kit (.gpu)")
    parser.add_argument(
        "--output", type=Path, default=Path(os.environ.get("OUT", "build/gpu/calls")), help="folder of results ($OUT)"
    )
    parser.add_argument("--rehearse", action="store_true", help="at small sizes, on CPUs, without Transformer Engine")
    options = parser.parse_args(arguments)
    try:
        return run(CALLS[options.call], options.kit.resolve(), options.output.resolve(), rehearse=options.rehearse)
    except NotReady as problem:
        print(f"error: {problem}", file=sys.stderr, flush=True)
        return 2


if __name__ == "__main__":
    sys.exit(main())
