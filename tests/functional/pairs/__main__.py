# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs of combined features, each in a process of its own, that train, validate, stop and go on; results and a table.

    python -m tests.functional.pairs --seed 0 --jobs 2

goes on where it was stopped: cases that have passed are not run again.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.functional import run_kills, sft_runs, shared_ray
from tests.functional.pairs.cases import Case, all_cases
from tests.functional.pairs.runs import faults_of
from tests.functional.pairs.settings import Inputs

CASE_LIMIT_S = 900.0
"""Against hanging alone: a case takes half a minute."""
END_LIMIT_S = 60.0
RESULTS, TABLE, RESULT, LOG = "pairs.jsonl", "table.md", "result.json", "log"
PROGRAM = "tests.functional.pairs"
MARK = "PAIRS_CASE"
"""Environment variable of all that a case starts."""


@dataclass(frozen=True)
class Result:
    """The end of a case.

    Attributes:
        case: Its name.
        settings: Its values that are not the simplest.
        faults: What is wrong; empty: it has passed.
        seconds: From start to end.
    """

    case: str
    settings: str
    faults: tuple[str, ...]
    seconds: float


def run_alone(case: Case, output: Path) -> int:
    """Run one case in this process, and write what is wrong with it."""
    folder = output / case.name
    shared_ray.start_shared_ray()
    try:
        found = faults_of(case, Inputs.made(output / "inputs"), folder)
    finally:
        shared_ray.end_shared_ray()
    print("\n".join(found))
    (folder / RESULT).write_text(json.dumps(found))
    return 1 if found else 0


def run_apart(case: Case, options: argparse.Namespace) -> Result:
    """Run one case in a process of its own, of which nothing may be left."""
    folder, began_s = options.output / case.name, time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", PROGRAM, "--only", case.name]
    command += ["--seed", str(options.seed), "--output", str(options.output)]
    environment = sft_runs.environment() | {MARK: str(folder)}
    with (folder / LOG).open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    faults: list[str] = []
    try:
        process.wait(CASE_LIMIT_S)
    except subprocess.TimeoutExpired:
        faults.append(f"no end within {CASE_LIMIT_S:g} s")
        process.kill()
        process.wait()
    if (folder / RESULT).is_file():
        faults += json.loads((folder / RESULT).read_text())
    elif not faults:
        faults.append(f"exit code {process.returncode}")
    if left := _left_behind(str(folder)):
        faults.append(f"left behind: processes {left}")
    seconds = time.monotonic() - began_s
    if faults:
        print(f"{case.name}: see {folder / LOG}; again: {' '.join(command)}\n  " + "\n  ".join(faults), flush=True)
    else:
        shutil.rmtree(folder)
        print(f"{case.name}: passed in {seconds:.0f} s", flush=True)
    return Result(case.name, case.described(), tuple(faults), round(seconds, 1))


def _left_behind(mark: str) -> list[int]:
    """Return the processes of a case that stay, and kill them."""
    deadline = time.monotonic() + END_LIMIT_S
    while (left := run_kills.processes_with(MARK, mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    for process_id in left:
        with suppress(ProcessLookupError):
            os.kill(process_id, signal.SIGKILL)
    return left


def read_results(path: Path) -> dict[str, Result]:
    """Return the last result of each case."""
    lines = path.read_text().splitlines() if path.is_file() else []
    results = (Result(**{**json.loads(line), "faults": tuple(json.loads(line)["faults"])}) for line in lines)
    return {result.case: result for result in results}


def table(results: Iterable[Result]) -> str:
    """Return the results as a table in Markdown."""
    rows = [("case", "settings", "result", "seconds"), ("---", "---", "---", "---:")]
    rows += [
        (each.case, each.settings, f"failed ({len(each.faults)})" if each.faults else "passed", f"{each.seconds:.0f}")
        for each in results
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the cases that have not passed, or one of them in this process.

    Returns:
        0; 1 where something was amiss.
    """
    options = _parse(arguments)
    cases = {case.name: case for case in all_cases(options.seed)}
    if options.list:
        print("\n".join(f"{name}: {case.described()}" for name, case in cases.items()))
        return 0
    if options.only is not None:
        return run_alone(cases[options.only], options.output)
    Inputs.made(options.output / "inputs")
    path = options.output / RESULTS
    chosen = [cases[name] for name in options.cases or cases]
    missing = [case for case in chosen if options.again or case.name not in _passed(path)]
    with ThreadPoolExecutor(options.jobs) as pool:
        for result in pool.map(lambda case: run_apart(case, options), missing):
            with path.open("a") as file:
                file.write(f"{json.dumps(asdict(result))}\n")
    results = read_results(path)
    found = [results[case.name] for case in chosen]
    print(table(found))
    (options.output / TABLE).write_text(f"{table(found)}\n")
    return 1 if any(result.faults for result in found) else 0


def _passed(path: Path) -> set[str]:
    return {name for name, result in read_results(path).items() if not result.faults}


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the array (default: 0)")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time (default: 1)")
    parser.add_argument("--cases", nargs="+", metavar="NAME", help="these alone (default: all)")
    parser.add_argument("--again", action="store_true", help="also those that have passed")
    parser.add_argument("--output", type=Path, default=Path("build/pairs"), help="folder (default: build/pairs)")
    parser.add_argument("--only", metavar="NAME", help="one case, in this process")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and their settings, and end")
    options = parser.parse_args(arguments)
    options.output = options.output.absolute()
    return options


if __name__ == "__main__":
    sys.exit(main())
