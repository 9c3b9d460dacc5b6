# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks of one GPU, one after the other, each in a process of its own: `make test-gpu`. Prints a JSON line a result.

A line has name, status (passed, failed, skipped), why, numbers and seconds, and of what ran: date, card, and releases
of torch, Transformer Engine and Megatron-Core. Nothing stops the checks behind one that fails, crashes or runs out of
time; the exit code is 1 where one failed. What a check prints is in build/gpu/NAME.log.
"""

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
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
        function: `module:function`; it takes what is true of a rehearsal and yields the numbers of each result, or
            raises.
        limit_s: Seconds that it may take.
        needs: Names in `NEEDS`.
    """

    name: str
    function: str
    limit_s: float
    needs: tuple[str, ...] = ("gpu", "transformer_engine")


_OF_VLLM = ("gpu", "transformer_engine", "vllm")

# In the order of what the rest stands on. Limits leave room for slow starts: each is about twice what is expected.
CHECKS = (
    Check("families", "tests.gpu.checks:families", 240),
    Check("sync", "tests.gpu.sync:sync", 90),
    Check("slice_step", "tests.gpu.checks:slice_step", 120),
    Check("rank_share", "tests.gpu.rank_share:rank_share", 360),
    Check("host_state", "tests.gpu.memory:host_state", 120),
    Check("refit", "tests.gpu.refit:refit", 180),
    Check("decode_auto", "tests.gpu.decode:auto", 80),
    Check("decode_fused", "tests.gpu.decode:fused", 80),
    Check("decode_unfused", "tests.gpu.decode:unfused", 80),
    Check("decode_flash", "tests.gpu.decode:flash", 80, ("gpu", "transformer_engine", "flash_attn")),
    Check("long", "tests.gpu.memory:long", 120),
    Check("save_and_resume", "tests.gpu.checks:save_and_resume", 100),
    Check("refusal_without_engine", "tests.gpu.checks:refusal_without_engine", 60, ("gpu",)),
    Check("vllm_routes_and_refit", "tests.gpu.vllm_check:vllm_routes_and_refit", 260, _OF_VLLM),
    Check("vllm_resume", "tests.gpu.vllm_check:vllm_resume", 390, _OF_VLLM),
    Check("tracking_cost", "tests.gpu.checks:tracking_cost", 120),
    Check("parity_with_cpu", "tests.gpu.parity_check:parity_with_cpu", 100),
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


def run_check(check: Check, folder: Path, limit_s: float, *, rehearse: bool) -> list[dict[str, Any]]:
    """Return the lines of one check. It leaves no process behind."""
    began = time.monotonic()
    results, log = folder / f"{check.name}.jsonl", folder / f"{check.name}.log"
    results.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.gpu.run", "--inside", check.function, "--result", str(results)]
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
    found = [json.loads(line) for line in results.read_text().splitlines()] if results.is_file() else []
    if code != 0:  # a crash behind results is a crash, and what was measured before it counts
        how = "" if code is None else signal.Signals(-code).name if code < 0 else f"exit code {code}"
        way = f"took longer than {limit_s:g} s" if code is None else f"ended by {how}"
        why, taken = f"{way}; its last line: {_last_line(log)}", round(time.monotonic() - began, 1)
        found.append({"status": "failed", "why": why, "numbers": {}, "seconds": taken, **_facts()})
    return [{"name": check.name, **line} for line in found]


def _facts(card: str | None = None) -> dict[str, str | None]:
    """Return what the numbers of a line are of; without the card, as its name would take a GPU's memory here."""
    releases = {name: _release(name) for name in ("torch", "transformer_engine", "megatron-core")}
    return {"date": datetime.now(UTC).date().isoformat(), "card": card, **releases}


def _release(name: str) -> str | None:
    """Return a package's release; `stand-in` for Transformer Engine's in the tests, None where there is none."""
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    is_stand_in = "transformer_engine_stand_in" in str(found.locate_file(""))
    return "stand-in" if is_stand_in else found.version


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


def run_checks(
    checks: Sequence[Check],
    folder: Path,
    *,
    rehearse: bool = False,
    deadline: float | None = None,
    output: Path | None = None,
) -> int:
    """Print the lines.

    Args:
        folder: Where logs go.
        rehearse: Run all bodies, at sizes that a CPU holds, whatever is missing here.
        deadline: Of `time.monotonic`; checks that have not ended by then fail, others are skipped.
        output: Folder that gets the lines (results.jsonl) and logs (checks.log) too, behind those that are there.

    Returns:
        The exit code.
    """
    folder.mkdir(parents=True, exist_ok=True)
    reasons = {need: NEEDS[need]() for need in sorted({need for check in checks for need in check.needs})}
    failed = False
    for check in checks:
        left_s = float("inf") if deadline is None else deadline - time.monotonic()
        limit_s = min(left_s, check.limit_s * (_PATIENCE if rehearse else 1))
        why = None if rehearse else next((reasons[need] for need in check.needs if reasons[need] is not None), None)
        why = why or (None if left_s > 0 else "no time is left")
        if why is not None:
            skipped = {"name": check.name, "status": "skipped", "why": why, "numbers": {}, "seconds": 0.0, **_facts()}
            lines = [skipped]
        else:
            lines = run_check(check, folder, limit_s, rehearse=rehearse)
        failed |= any(line["status"] == "failed" for line in lines)
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        print(text, end="", flush=True)
        if output is not None:
            log = folder / f"{check.name}.log"
            _append(output / "results.jsonl", text)
            _append(
                output / "checks.log", f"== {check.name}\n" + (log.read_text(errors="replace") if why is None else why)
            )
    return int(failed)


def _append(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def _inside(function: str, results: Path, *, rehearse: bool) -> None:
    """Run one check in its own process; write a line a result as it comes."""
    module, _, name = function.partition(":")
    began = time.monotonic()

    def write(status: str, why: str, numbers: Mapping[str, Any]) -> None:
        nonlocal began
        taken, began = round(time.monotonic() - began, 1), time.monotonic()
        card = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        line = {"status": status, "why": why, "numbers": numbers, "seconds": taken, **_facts(card)}
        _append(results, f"{json.dumps(line)}\n")

    try:
        import torch

        for numbers in getattr(importlib.import_module(module), name)(rehearse=rehearse):
            write("passed", "", numbers)
    # A check's numbers say most where it fails.
    except Exception as error:
        traceback.print_exc()
        write("failed", f"{type(error).__name__}: {error}"[:1000], getattr(error, "numbers", {}))
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the command line and runs; returns the exit code."""
    names = [check.name for check in CHECKS]
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.run", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--rehearse", action="store_true", help="at small sizes, on CPUs: the checks' own code")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="for all of them together")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="gets results.jsonl and checks.log too")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.inside:
        _inside(options.inside, options.result, rehearse=options.rehearse)
        return 0
    # A run that is stopped ends the check that it waits for, which is in a session of its own.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    chosen = [check for check in CHECKS if check.name in options.only]
    deadline = None if options.limit is None else time.monotonic() + options.limit
    return run_checks(
        chosen, REPOSITORY / "build" / "gpu", rehearse=options.rehearse, deadline=deadline, output=options.output
    )


if __name__ == "__main__":
    sys.exit(main())
