# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks of one GPU, one after the other, each in a process of its own: `make test-gpu`. Prints a JSON line a check.

A line has name, status (passed, failed, skipped), why, numbers and seconds. Nothing stops the checks behind one that
fails, crashes or runs out of time; the exit code is 1 where one failed. What a check prints is in build/gpu/NAME.log.
"""

import argparse
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
_GRACE_S = 5.0
# A rehearsal may take longer: it runs where others build and test.
_PATIENCE = 5


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        name: As printed.
        function: `module:function`; it takes what is true of a rehearsal and returns numbers, or raises.
        limit_s: Seconds that it may take.
        needs: Names in `NEEDS`.
    """

    name: str
    function: str
    limit_s: float
    needs: tuple[str, ...] = ("gpu", "transformer_engine")


# In the order of what the rest stands on. The limits add up to ten minutes.
CHECKS = (
    Check("families", "tests.gpu.checks:families", 120),
    Check("slice_step", "tests.gpu.checks:slice_step", 80),
    Check("decode_auto", "tests.gpu.checks:decode_auto", 40),
    Check("decode_flash", "tests.gpu.checks:decode_flash", 40, ("gpu", "transformer_engine", "flash_attn")),
    Check("save_and_resume", "tests.gpu.checks:save_and_resume", 50),
    Check("refusal_without_engine", "tests.gpu.checks:refusal_without_engine", 30, ("gpu",)),
    Check(
        "vllm_routes_and_refit",
        "tests.gpu.vllm_check:vllm_routes_and_refit",
        130,
        ("gpu", "transformer_engine", "vllm"),
    ),
    Check("tracking_cost", "tests.gpu.checks:tracking_cost", 60),
    Check("parity_with_cpu", "tests.gpu.parity_check:parity_with_cpu", 50),
)


def _no_gpu() -> str | None:
    import torch

    return None if torch.cuda.is_available() else f"no GPU: torch {torch.__version__} sees none"


def _missing(module: str, cure: str) -> Callable[[], str | None]:
    return lambda: None if importlib.util.find_spec(module) else f"{module} is not installed: {cure}"


NEEDS: dict[str, Callable[[], str | None]] = {
    "gpu": _no_gpu,
    "transformer_engine": _missing("transformer_engine", "make gpu"),
    "vllm": _missing("vllm", "make gpu"),
    "flash_attn": _missing("flash_attn", "pip install --no-build-isolation flash-attn"),
}
"""What a check may need, and why it is not here."""


def run_check(check: Check, folder: Path, *, rehearse: bool) -> dict[str, Any]:
    """The line of one check. It leaves no process behind."""
    began = time.monotonic()
    result, log = folder / f"{check.name}.json", folder / f"{check.name}.log"
    result.unlink(missing_ok=True)
    limit_s = check.limit_s * (_PATIENCE if rehearse else 1)
    command = [sys.executable, "-m", "tests.gpu.run", "--inside", check.function, "--result", str(result)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *(["--rehearse"] if rehearse else [])],
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end_group(process)
    found: dict[str, Any] = {"status": "failed", "why": "", "numbers": {}}
    # A result that was written counts only where the process also ended well: a crash behind it is a crash.
    if code == 0 and result.is_file():
        found |= json.loads(result.read_text(encoding="utf-8"))
    elif code is None:
        found["why"] = f"took longer than {limit_s:g} s; its last line: {_last_line(log)}"
    else:
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        found["why"] = f"ended by {how}; its last line: {_last_line(log)}"
    return {"name": check.name, **found, "seconds": round(time.monotonic() - began, 1)}


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends whatever is left of a check: first asked, as a run of training ends its workers itself, then killed."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "none"


def run_checks(checks: Sequence[Check], folder: Path, *, rehearse: bool = False) -> int:
    """Prints the lines.

    Args:
        checks: Which.
        folder: Where logs go.
        rehearse: Run all bodies, at sizes that a CPU holds, whatever is missing here.

    Returns:
        The exit code.
    """
    folder.mkdir(parents=True, exist_ok=True)
    reasons = {need: NEEDS[need]() for need in sorted({need for check in checks for need in check.needs})}
    failed = False
    for check in checks:
        why = next((reasons[need] for need in check.needs if reasons[need] is not None), None)
        if why is not None and not rehearse:
            line: dict[str, Any] = {"name": check.name, "status": "skipped", "why": why, "numbers": {}, "seconds": 0.0}
        else:
            line = run_check(check, folder, rehearse=rehearse)
        failed |= line["status"] == "failed"
        print(json.dumps(line), flush=True)
    return int(failed)


def _inside(function: str, result: Path, *, rehearse: bool) -> None:
    """Run one check in its own process."""
    module, _, name = function.partition(":")
    found: dict[str, Any] = {"status": "passed", "why": "", "numbers": {}}
    try:
        found["numbers"] = getattr(importlib.import_module(module), name)(rehearse=rehearse)
    # A check's numbers say most where it fails.
    except Exception as error:
        traceback.print_exc()
        found |= {"status": "failed", "why": f"{type(error).__name__}: {error}"[:1000]}
        found["numbers"] = getattr(error, "numbers", {})
    result.write_text(json.dumps(found), encoding="utf-8")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the command line and runs; returns the exit code."""
    names = [check.name for check in CHECKS]
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.run", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--rehearse", action="store_true", help="at small sizes, on CPUs: the checks' own code")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.inside:
        _inside(options.inside, options.result, rehearse=options.rehearse)
        return 0
    # A run that is stopped ends the check that it waits for, which is in a session of its own.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    chosen = [check for check in CHECKS if check.name in options.only]
    return run_checks(chosen, REPOSITORY / "build" / "gpu", rehearse=options.rehearse)


if __name__ == "__main__":
    sys.exit(main())
