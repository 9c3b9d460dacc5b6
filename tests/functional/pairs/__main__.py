# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs of combined features that train, validate, stop and go on; results in a file, and a table.

    python -m tests.functional.pairs --seed 0 --jobs 2

goes on where it was stopped: cases that have passed are not run again.
"""

import argparse
import faulthandler
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from nemo_rl_moe.atomic_writes import write_whole
from tests.functional import run_kills, sft_runs, shared_ray
from tests.functional.pairs.cases import Case, all_cases
from tests.functional.pairs.runs import faults_of
from tests.functional.pairs.settings import Inputs

CASE_LIMIT_S = 900.0
"""Against hanging alone: a case takes half a minute."""
END_LIMIT_S = 60.0
POLL_S = 0.2
CASES_A_PROCESS = 8
"""Starting a process and its Ray takes as long as a case."""
RESULTS, TABLE, RESULT = "pairs.jsonl", "table.md", "result.json"
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


def run_here(cases: Sequence[Case], output: Path) -> int:
    """Run cases in this process, and write what is wrong with each; one that has failed is the last."""
    shared_ray.start_shared_ray()
    try:
        for case in cases:
            folder = output / case.name
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            began_s = time.monotonic()
            faulthandler.dump_traceback_later(0.9 * CASE_LIMIT_S)  # a case that hangs says where, and is ended then
            found = tuple(faults_of(case, Inputs.made(output / "inputs"), folder))
            result = Result(case.name, case.described(), found, round(time.monotonic() - began_s, 1))
            write_whole(folder / RESULT, json.dumps(asdict(result)))
            if found:
                return 1
    finally:
        faulthandler.cancel_dump_traceback_later()
        shared_ray.end_shared_ray()
    return 0


class Campaign:
    """Cases, some at a time: a process runs several, one after the other, on one Ray.

    Args:
        options: Of the command line.
        cases: What is to be run.
    """

    def __init__(self, options: argparse.Namespace, cases: Iterable[Case]):
        self._options, self._waiting = options, deque(cases)
        self._lock, self._marks, self._is_stopping = threading.Lock(), set[str](), threading.Event()

    def run(self) -> None:
        """Run them, and append the result of each to the file."""
        with ThreadPoolExecutor(self._options.jobs) as pool:
            try:
                for done in [pool.submit(self._work) for _ in range(self._options.jobs)]:
                    done.result()
            except BaseException:
                self._stop()
                raise

    def _stop(self) -> None:
        with self._lock:
            self._is_stopping.set()
            self._waiting.clear()
            for mark in self._marks:
                _kill(run_kills.processes_with(MARK, mark))

    def _work(self) -> None:
        while cases := self._take():
            not_run = self._run(cases)
            with self._lock:
                self._waiting.extendleft(reversed(not_run))

    def _take(self) -> list[Case]:
        with self._lock:
            size = min(CASES_A_PROCESS, -(-len(self._waiting) // self._options.jobs))
            return [self._waiting.popleft() for _ in range(size)]

    def _run(self, cases: Sequence[Case]) -> Sequence[Case]:
        """Run cases in a process of their own, until one fails; return those that come behind it."""
        output, names = self._options.output, [case.name for case in cases]
        log, mark = output / f"{names[0]}.log", uuid.uuid4().hex
        command = [sys.executable, "-m", PROGRAM, "--seed", str(self._options.seed), "--output", str(output)]
        for name in names:
            (output / name / RESULT).unlink(missing_ok=True)
        with log.open("wb") as file, self._lock:
            if self._is_stopping.is_set():
                return []
            self._marks.add(mark)
            process = subprocess.Popen(
                [*command, "--here", "--cases", *names],
                env=sft_runs.environment() | {MARK: mark},
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        for number, case in enumerate(cases, start=1):
            result = _wait_for(case, process, output)
            if self._is_stopping.is_set():
                return []
            is_last = number == len(cases) or bool(result.faults)
            if is_last and (left := _left_behind(process, mark)):
                result = replace(result, faults=(*result.faults, f"left behind: processes {left}"))
            self._report(result, [*command, "--here", "--cases", case.name], log)
            if is_last:
                if not result.faults:
                    log.unlink()
                return cases[number:]
        return []

    def _report(self, result: Result, command: Sequence[str], log: Path) -> None:
        with self._lock, (self._options.output / RESULTS).open("a") as file:
            file.write(f"{json.dumps(asdict(result))}\n")
        if result.faults:
            told = "\n  ".join(result.faults)
            print(f"{result.case}: see {log}; again: {' '.join(command)}\n  {told}", flush=True)
        else:
            shutil.rmtree(self._options.output / result.case)
            print(f"{result.case}: passed in {result.seconds:.0f} s", flush=True)


def _wait_for(case: Case, process: subprocess.Popen[bytes], output: Path) -> Result:
    """Wait for the end of a case, or of its process; end a process that hangs."""
    began_s, path = time.monotonic(), output / case.name / RESULT
    while not path.is_file():
        seconds = time.monotonic() - began_s
        if process.poll() is not None and not path.is_file():
            return Result(case.name, case.described(), (f"exit code {process.returncode}",), round(seconds, 1))
        if seconds > CASE_LIMIT_S:
            process.kill()
            return Result(case.name, case.described(), (f"no end within {CASE_LIMIT_S:g} s",), round(seconds, 1))
        time.sleep(POLL_S)
    return _result(path.read_text())


def _left_behind(process: subprocess.Popen[bytes], mark: str) -> list[int]:
    """Wait for the end of all that a process has started; return what stays, and kill it."""
    process.wait()
    deadline = time.monotonic() + END_LIMIT_S
    while (left := run_kills.processes_with(MARK, mark)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    _kill(left)
    return left


def _kill(process_ids: Iterable[int]) -> None:
    for process_id in process_ids:
        with suppress(ProcessLookupError):
            os.kill(process_id, signal.SIGKILL)


def _result(line: str) -> Result:
    values = json.loads(line)
    return Result(**values | {"faults": tuple(values["faults"])})


def read_results(path: Path) -> dict[str, Result]:
    """Return the last result of each case."""
    lines = path.read_text().splitlines() if path.is_file() else []
    return {result.case: result for result in map(_result, lines)}


def table(results: Iterable[Result]) -> str:
    """Return the results as a table in Markdown."""
    rows = [("case", "settings", "result", "seconds"), ("---", "---", "---", "---:")]
    rows += [
        (each.case, each.settings, f"failed ({len(each.faults)})" if each.faults else "passed", f"{each.seconds:.0f}")
        for each in results
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases that have not passed, or some in this process.

    Returns:
        0; 1 where something was amiss; 130 where it was stopped.
    """
    options = _parse(arguments)
    cases = {case.name: case for case in all_cases(options.seed)}
    chosen = [cases[name] for name in options.cases or cases]
    if options.list:
        print("\n".join(f"{case.name}: {case.described()}" for case in chosen))
        return 0
    if options.here:
        return run_here(chosen, options.output)
    Inputs.made(options.output / "inputs")
    path = options.output / RESULTS
    passed = {(name, result.settings) for name, result in read_results(path).items() if not result.faults}
    missing = [case for case in chosen if options.again or (case.name, case.described()) not in passed]
    former = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        Campaign(options, missing).run()
    except KeyboardInterrupt:
        print("stopped; the same command goes on", flush=True)
        return 128 + signal.SIGINT
    finally:
        signal.signal(signal.SIGTERM, former)
    results = read_results(path)
    found = table(results[case.name] for case in chosen)
    print(found)
    (options.output / TABLE).write_text(f"{found}\n")
    return 1 if any(results[case.name].faults for case in chosen) else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the array (default: 0)")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time (default: 1)")
    parser.add_argument("--cases", nargs="+", metavar="NAME", help="these alone (default: all)")
    parser.add_argument("--again", action="store_true", help="also those that have passed")
    parser.add_argument("--output", type=Path, default=Path("build/pairs"), help="folder (default: build/pairs)")
    parser.add_argument("--here", action="store_true", help="in this process, until one fails")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and their settings, and end")
    options = parser.parse_args(arguments)
    options.output = options.output.absolute()
    return options


if __name__ == "__main__":
    sys.exit(main())
