# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A campaign of drills: chains of runs that are hit in every phase, in any number; results in a file, and a table.

    python -m tests.functional.drills --kills 500 --seed 0 --jobs 2

goes on where it was stopped: by Ctrl-C, or by a file `pause` in the output's folder, which holds back the next chain.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from nemo_rl_moe.generation.vllm.releases import installed_release
from tests.functional import run_kills, sft_runs
from tests.functional.drill_chain import END_LIMIT_S, Chain
from tests.functional.drill_faults import plan
from tests.functional.drill_moments import COMPLETION_LIMIT_S
from tests.functional.drill_records import Logs, Reference
from tests.functional.drill_runs import KINDS, Kind, make_inputs
from tests.functional.ray_nodes import RayNodes

STEPS_A_DRILL = 3
LAST_STEPS = 12
LONGEST_CHAIN = 12
RESULTS = "drills.jsonl"
PAUSE = "pause"
PAUSE_POLL_S = 2.0


def reference_of(kind: Kind, folder: Path, num_steps: int) -> Reference:
    """The unharmed run of a kind, made where it is not there yet."""
    place = folder / "references" / f"{kind.name}-{num_steps}"
    reference = Reference(Logs(place), kind.inexact)
    if not (place / "done").exists():
        shutil.rmtree(place, ignore_errors=True)
        command = kind.command(place, make_inputs(folder / "inputs"), num_steps)
        nodes = RayNodes(Path(f"/tmp/d{os.getpid()}-{kind.name[:3]}"), kind.num_nodes)
        try:
            environment = {"RAY_ADDRESS": nodes.address()} if kind.num_nodes > 1 else {}
            with run_kills.running(command, place / "work", environment, nodes.process) as run:
                assert run.wait_for_end(COMPLETION_LIMIT_S) == 0, run.printed + run.errors
                run.wait_until_nothing_runs(END_LIMIT_S)
        finally:
            nodes.end()
        if doubts := reference.doubts():
            raise AssertionError(f"{kind.name}: {'; '.join(doubts)}")
        (place / "done").touch()
    return reference


def make_references(options: argparse.Namespace) -> None:
    """Makes the unharmed runs that are not there yet, as many at a time as chains."""
    make_inputs(options.output / "inputs")
    size = drills_a_chain(options.kills, len(kinds_of(options)))
    num_steps = num_steps_of(size)
    kinds = kinds_of(options)[: -(-options.kills // size)]  # a chain that ends early may call for another kind later
    with ThreadPoolExecutor(options.jobs) as pool:
        made = [pool.submit(reference_of, kind, options.output, kind.num_steps(num_steps)) for kind in kinds]
        for kind, reference in zip(kinds, made, strict=True):
            reference.result()
            print(f"unharmed run of {kind.name}: there", flush=True)


def run_chain(options: argparse.Namespace, index: int) -> bool:
    """Runs one chain in this process, and writes its results into its folder; False where something is amiss."""
    kind, turn = kind_of(options, index)
    folder = chain_folder(options, index)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with_disk = os.geteuid() == 0
    size = drills_a_chain(options.kills, len(kinds_of(options)))
    num_steps = kind.num_steps(num_steps_of(size))
    reference = reference_of(kind, options.output, num_steps)
    chance = random.Random(f"{options.seed} {index}")
    chain = Chain(kind, folder, make_inputs(options.output / "inputs"), num_steps, reference, chance)
    chosen = {"victims": options.victims, "phases": options.phases}
    drills = plan(kind, options.seed, turn, size, with_disk=with_disk, **chosen)
    with chain.opened(with_disk=with_disk):
        results = chain.run(drills)
        faults = chain.faults()
    for result in results:
        result.equal = not faults
    if faults:
        print(f"not equal to the unharmed run: {'; '.join(faults)}", flush=True)
    is_well = not faults and all(result.is_well for result in results)
    lines = [
        {"seed": options.seed, "chain": index, "number": number, **asdict(result)}
        for number, result in enumerate(results)
    ]
    (folder / RESULTS).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return is_well


def kinds_of(options: argparse.Namespace) -> list[Kind]:
    """The kinds of runs that are hit, in turns."""
    return [KINDS[name] for name in options.kinds]


def kind_of(options: argparse.Namespace, index: int) -> tuple[Kind, int]:
    """Kind of a chain, and how many chains of that kind come before it."""
    kinds = kinds_of(options)
    turn, place = divmod(index, len(kinds))
    return kinds[place], turn


def drills_a_chain(num_kills: int, num_kinds: int) -> int:
    """Drills of each chain: a dozen, or fewer so that a small campaign has chains of all kinds."""
    return min(LONGEST_CHAIN, -(-num_kills // num_kinds))


def num_steps_of(size: int) -> int:
    """Steps of a run that is hit so often: of those that it survives, a few pass until that is seen."""
    return size * STEPS_A_DRILL + LAST_STEPS


def chain_folder(options: argparse.Namespace, index: int) -> Path:
    """Folder of a chain."""
    folder: Path = options.output / f"seed_{options.seed}" / f"chain_{index}"
    return folder


class Campaign:
    """Chains, some at a time, each in a process of its own, until there have been enough drills.

    Args:
        options: Of the command line.
    """

    def __init__(self, options: argparse.Namespace):
        self._options = options
        self._file = options.output / RESULTS
        self._lock = threading.Lock()
        self._is_stopping = False
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._failed: list[int] = []
        done = [line for line in read_results(self._file) if line["seed"] == options.seed]
        self._num_done = len(done)
        self._next = 0
        self._taken = {line["chain"] for line in done}
        self._num_running = 0

    def run(self) -> list[int]:
        """Runs what is missing; returns the chains in which something was amiss."""
        try:
            with ThreadPoolExecutor(self._options.jobs) as pool:
                workers = [pool.submit(self._work) for _ in range(self._options.jobs)]
                try:
                    for worker in workers:
                        worker.result()
                except KeyboardInterrupt:
                    self._stop()
                    raise
        finally:
            self._stop()
        return self._failed

    def _stop(self) -> None:
        with self._lock:
            self._is_stopping = True
            for process in self._processes:
                process.terminate()

    def _take(self) -> int | None:
        """The next chain; None where there are enough."""
        size = drills_a_chain(self._options.kills, len(kinds_of(self._options)))
        with self._lock:
            if self._is_stopping or self._num_done + self._num_running * size >= self._options.kills:
                return None
            while self._next in self._taken:
                self._next += 1
            self._taken.add(self._next)
            self._num_running += 1
            return self._next

    def _work(self) -> None:
        while (index := self._take()) is not None:
            while (self._options.output / PAUSE).exists() and not self._is_stopping:
                time.sleep(PAUSE_POLL_S)
            self._run(index)

    def _run(self, index: int) -> None:
        options, folder = self._options, chain_folder(self._options, index)
        folder.mkdir(parents=True, exist_ok=True)
        log = folder.with_suffix(".log")
        command = [
            *(sys.executable, "-m", __spec__.name, "--only", str(index), "--kills", str(options.kills)),
            *("--seed", str(options.seed), "--output", str(options.output), "--kinds", *options.kinds),
            *(("--victims", *options.victims) if options.victims else ()),
            *(("--phases", *options.phases) if options.phases else ()),
        ]
        with log.open("wb") as output:
            with self._lock:
                if self._is_stopping:
                    return
                process = subprocess.Popen(
                    command, env=sft_runs.environment(), stdout=output, stderr=output, start_new_session=True
                )
                self._processes.add(process)
            code = process.wait()
        with self._lock:
            self._processes.discard(process)
            self._num_running -= 1
            if self._is_stopping:
                return
            text = (folder / RESULTS).read_text() if (folder / RESULTS).is_file() else ""
            with self._file.open("a") as file:
                file.write(text)
            self._num_done += text.count("\n")
            reported = f"chain {index} ({kind_of(options, index)[0].name}): {text.count(chr(10))} drills"
            print(f"{reported}; {self._num_done} of {options.kills}", flush=True)
            if code == 0:
                shutil.rmtree(folder, ignore_errors=True)
                log.unlink()
            else:
                self._failed.append(index)
                print(f"  amiss, see {log} and {folder}; again: {' '.join(command[1:])}", flush=True)


def read_results(file: Path) -> list[dict[str, Any]]:
    """The results of all chains that have come to their end."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


PHASES = (
    "start",
    "reference",
    "generation",
    "calling",
    "scoring",
    "logprobs",
    "train",
    "refit",
    "validation",
    "saving",
    "end",
)
TOTALS: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    "drills": lambda result: True,
    "as it should": lambda result: result["ended"] is not False and not result["problem"],
    "went on": lambda result: result["went_on"],
    "equal": lambda result: result["equal"],
    "left behind": lambda result: bool(result["left"]),
}


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """The results as a table in Markdown: a row for what was hit and how, a column for each phase, and sums.

    A sum counts the drills that ended the run as they should, or that it survived as it should; after which it went on;
    after which its end was equal to an unharmed one's; and that left processes or files behind.
    """
    hit = sorted({(result["victim"], result["fault"]) for result in results})
    groups = [(f"{victim}: {fault}", _of(results, victim, fault)) for victim, fault in hit] + [("all", results)]
    rows = [("hit", *PHASES, *TOTALS), tuple("---" for _ in ("hit", *PHASES, *TOTALS))]
    for name, members in groups:
        by_phase = [sum(member["phase"] == phase for member in members) for phase in PHASES]
        sums = [sum(map(counts, members)) for counts in TOTALS.values()]
        rows.append((name, *(str(count or "") for count in by_phase), *map(str, sums)))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _of(results: Sequence[Mapping[str, Any]], victim: str, fault: str) -> list[Mapping[str, Any]]:
    return [result for result in results if (result["victim"], result["fault"]) == (victim, fault)]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=12, help="drills in all (default: 12)")
    parser.add_argument("--seed", type=int, default=0, help="of victims and moments (default: 0)")
    parser.add_argument("--jobs", type=int, default=1, help="chains at a time (default: 1)")
    parser.add_argument("--output", type=Path, default=Path("build/drills"), help="folder (default: build/drills)")
    able = [name for name, kind in KINDS.items() if not kind.uses_vllm or installed_release() is not None]
    shipped = [name for name in able if not KINDS[name].only_if_asked]
    parser.add_argument(
        "--kinds", nargs="+", choices=able, default=shipped, help=f"of runs (default: {' '.join(shipped)})"
    )
    parser.add_argument("--victims", nargs="+", default=(), help="strike these alone, such as raylet: a whole node")
    parser.add_argument("--phases", nargs="+", default=(), choices=PHASES, help="strike in these alone")
    parser.add_argument("--only", type=int, help="one chain, by its number, in this process")
    parser.add_argument("--table", action="store_true", help="print the table of what has been done, and end")
    options = parser.parse_args(arguments)
    options.output = options.output.absolute()
    return options


def _interrupt(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a campaign, or one chain of it, or prints its table.

    Returns:
        0; 1 where something was amiss; 130 where it was stopped.
    """
    options = _parse(arguments)
    if options.table:
        print(table(read_results(options.output / RESULTS)))
        return 0
    options.output.mkdir(parents=True, exist_ok=True)
    if installed_release() is None:
        print("vLLM is not installed (make vllm): no drills of grpo_vllm", flush=True)
    former = signal.signal(signal.SIGTERM, _interrupt)
    try:
        if options.only is not None:
            return 0 if run_chain(options, options.only) else 1
        make_references(options)
        failed = Campaign(options).run()
    except KeyboardInterrupt:
        print("stopped; the same command goes on", flush=True)
        return 128 + signal.SIGINT
    finally:
        signal.signal(signal.SIGTERM, former)
    print(table(read_results(options.output / RESULTS)))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
