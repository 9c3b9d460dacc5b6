# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A chain: one run that is hit again and again on its way, started anew each time, and equals an unharmed one."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from tests.functional import run_kills
from tests.functional.drill_accounts import Accounts
from tests.functional.drill_faults import Drill
from tests.functional.drill_moments import COMPLETION_LIMIT_S, Moments, Notes, last_step, victims_of
from tests.functional.drill_records import Logs, Reference
from tests.functional.drill_runs import Kind
from tests.functional.ray_nodes import RayNodes

END_LIMIT_S = 200.0
PATIENT_END_LIMIT_S = 400.0
"""For a frozen rank, whose call has a time limit, and for a cluster that has lost its head: workers and driver go on
without it, and Ray ends them after a minute."""
GOING_ON_LIMIT_S = 400.0
"""A new engine of vLLM takes half a minute to start."""
PAUSE_S = 3.0
DISK_SIZE = "160m"
SHARED_MEMORY = Path("/dev/shm")
INTERRUPTED = re.compile(r"^error: (generation engine )?(?:\w+: )?worker rank \d .*? in `(\w+)`", re.MULTILINE)
NOT_SAVED = "could not be saved"
MOST_RETRIES = 3
CACHE = "torchinductor_"
NODES_FOLDER = "ray"
LOST_AT_ITS_END = re.compile(
    rf"checkpoints/final: cannot be written|^error: the checkpoint of step \d+ {NOT_SAVED}", re.MULTILINE
)
"""Of the message of a run whose folder, or whose checkpoints, are deleted while it writes its last ones."""


@dataclass
class Result:
    """Outcome of one drill.

    Attributes:
        kind: Kind of run.
        phase: When it was hit.
        victim: What was hit.
        fault: How.
        moment: More about when: the text of the start that it followed.
        during: What a worker's death was reported to have interrupted.
        seconds: Until all of it was gone, or until it was seen to go on.
        ended: It ended as it should; None where it was to go on.
        went_on: It got further, by itself or when it was started again.
        equal: At last the chain's run was equal to the unharmed one.
        left: What it left behind: processes, files.
        problem: What else was not as it should be.
    """

    kind: str
    phase: str
    victim: str
    fault: str
    moment: str = ""
    during: str = ""
    seconds: float = 0.0
    ended: bool | None = None
    went_on: bool = False
    equal: bool = False
    left: list[str] = field(default_factory=list)
    problem: str = ""

    @property
    def is_well(self) -> bool:
        """True where all was as it should be."""
        return self.ended is not False and self.went_on and not self.problem


class Chain:
    """One run, hit by one drill after the other.

    Args:
        kind: The kind of run.
        folder: Of its own; gets `logs` and the outputs of each attempt.
        inputs: Data and model of all kinds.
        num_steps: Steps of the run.
        reference: The unharmed run.
        chance: Chooses victims and moments.

    Attributes:
        lost_until: Last step whose records were lost, or may have been, with a folder that a drill has deleted; None
            where none has been.
        routes_lost: Steps whose routes an engine may have taken with it: it keeps them until the trainer has them.
    """

    def __init__(
        self, kind: Kind, folder: Path, inputs: Path, num_steps: int, reference: Reference, chance: random.Random
    ):
        self.kind, self.folder, self.chance = kind, folder, chance
        self.num_steps = num_steps
        # Ray's sockets lie in the temporary folder, and their names must be short.
        self._temporary = Path(f"/tmp/d{os.getpid()}")
        self._notes = Notes(folder / "reward_functions", folder / "callers")
        for path in (self._temporary, self._notes.scoring, self._notes.calling):
            path.mkdir(parents=True)
        self._disk = folder / "disk"
        self.logs = Logs(self._disk)
        self._moments = Moments(kind, self.logs, reference, chance, self._notes)
        self.command = kind.command(self._disk, inputs, num_steps)
        self._nodes = RayNodes(self._temporary / NODES_FOLDER, kind.num_nodes)
        self._reference, self._accounts = reference, Accounts(self.logs)
        self.lost_until: int | None = None
        self.routes_lost: set[int] = set()
        self._num_attempts = 0
        self._shared_memory = _names(SHARED_MEMORY)

    @property
    def _joins(self) -> bool:
        """True where its attempts join Ray nodes that are there before."""
        return self.kind.num_nodes > 1

    @contextmanager
    def opened(self, *, with_disk: bool) -> Iterator["Chain"]:
        """Makes what it needs of the machine, a small file system too, and gives it back."""
        self._disk.mkdir()
        if with_disk:
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_SIZE}", "tmpfs", self._disk], check=True)
        try:
            yield self
        finally:
            self._nodes.end()
            if with_disk:
                kept = self.folder / "kept"
                shutil.copytree(self._disk, kept, ignore=shutil.ignore_patterns("step_*", ".step_*"))
                subprocess.run(["umount", "--lazy", self._disk], check=True)
            shutil.rmtree(self._temporary, ignore_errors=True)

    def run(self, drills: Sequence[Drill]) -> list[Result]:
        """Strikes once for each drill, and lets the run come to its end; fewer where it is complete before."""
        waiting, results = deque(drills), list[Result]()
        for _ in range(len(drills) + MOST_RETRIES):
            with self._attempt() as run:
                if self._strike_while_it_runs(run, waiting, results):
                    continue
                code = self._wait_for_end(run)
                # What is deleted under the run while it writes its last weights is reported, and it ends.
                is_reported = LOST_AT_ITS_END.search(run.errors) is not None
                has_vanished = bool(results) and results[-1].fault == "vanish"
                is_excused = has_vanished and is_reported
            # Deleted behind the last weights, with these: the run had ended well, and is done once more.
            if code == 0 and (self.logs.weights() or not has_vanished):
                break
            if results and code != 0 and not is_excused:
                results[-1].problem += f"; the attempt after it ended with exit code {code}"
        is_complete = bool(self.logs.weights())
        for index, result in enumerate(results):
            if result.ended is not None:
                result.went_on = index + 1 < len(results) or is_complete
        return results

    def faults(self) -> list[str]:
        """Return what is wrong with the run, which has come to its end: differences from the unharmed one, or accounts
        that are not right.
        """
        if self.kind.repeats:
            return self._reference.differences(
                self.logs, lost_until=self.lost_until, routes_lost=frozenset(self.routes_lost)
            )
        print(f"groups of queues that came back: {sorted(self._accounts.queued)}", flush=True)
        return list(self._accounts.faults(self.num_steps, lost_until=self.lost_until))

    def _strike_while_it_runs(self, run: run_kills.Run, waiting: deque[Drill], results: list[Result]) -> bool:
        """Strikes until a drill has ended the attempt: then True."""
        while waiting:
            try:
                moment = self._moments.wait(run, waiting[0])
            except run_kills.RunHasEndedError:
                return False
            drill = waiting.popleft()
            result = Result(self.kind.name, drill.phase, drill.victim, drill.fault, moment)
            results.append(result)
            at = time.monotonic()
            try:
                self._strike(run, drill, result)
            except AssertionError as error:
                result.problem += f"; {str(error).splitlines()[0]}"
                result.ended = False
            result.seconds = round(time.monotonic() - at, 1)
            if result.ended is not None:
                run.end()
                self._look_for_leftovers(run, result)
            print(json.dumps(asdict(result)), flush=True)
            if result.ended is not None:
                return True
        return False

    def _wait_for_end(self, run: run_kills.Run) -> int | None:
        """Exit code of an attempt that nothing more is done to; None where it does not end."""
        try:
            code = run.wait_for_end(COMPLETION_LIMIT_S)
            run.wait_until_nothing_runs(END_LIMIT_S)
        except AssertionError as error:
            print(error, flush=True)
            return None
        return code

    @contextmanager
    def _attempt(self) -> Iterator[run_kills.Run]:
        """The command, started once more; nothing of it is left."""
        environment = {"TMPDIR": str(self._temporary)} | self._notes.environment()
        if self._joins:
            environment["RAY_ADDRESS"] = self._nodes.address()
        self._num_attempts += 1
        self._accounts.note_restart()
        folder = self.folder / "attempts" / f"{self._num_attempts}"
        with run_kills.running(self.command, folder, environment, self._nodes.process) as run:
            yield run

    def _strike(self, run: run_kills.Run, drill: Drill, result: Result) -> None:
        before = last_step(run)
        if drill.fault in ("full", "vanish"):
            self._harm_disk(run, drill, result)
        else:
            victims = victims_of(run, drill.victim, self._notes)
            if drill.phase == "end" and not victims:
                pass  # it was quicker
            else:
                assert victims, f"no {drill.victim}"
                if drill.victim == "engine":
                    self.routes_lost |= {before + 1, before + 2}
                for victim in victims if drill.victim == "all" else [self.chance.choice(victims)]:
                    _signal(victim, drill.fault)
        if drill.survived and result.ended is None:
            self._see_it_go_on(run, drill, result, before)
        else:
            self._see_it_end(run, drill, result)

    def _harm_disk(self, run: run_kills.Run, drill: Drill, result: Result) -> None:
        if drill.fault == "full":
            filler = self._disk / "filler"
            with suppress(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(2**16))
            reported = run.printed.count(NOT_SAVED)
            try:
                run.wait_for(lambda: run.printed.count(NOT_SAVED) > reported, GOING_ON_LIMIT_S)
            finally:
                filler.unlink()
            return
        below = "logs/*" if drill.victim == "run folder" else "logs/*/checkpoints"
        for folder in list(self._disk.glob(below)):
            shutil.rmtree(folder, ignore_errors=True)
        self._accounts.forget()
        if drill.victim == "run folder":
            # A step's record is written before the step is reported; at the end there are no more.
            lost = self.num_steps if drill.phase == "end" else last_step(run) + 1
            self.lost_until = max(self.lost_until or 0, lost)

    def _see_it_go_on(self, run: run_kills.Run, drill: Drill, result: Result, before: int) -> None:
        """Waits until the attempt has done more than the step in which it was hit, or has come to its end."""
        try:
            run.wait_for(lambda: last_step(run) >= min(before + 2, self.num_steps), GOING_ON_LIMIT_S)
        except run_kills.RunHasEndedError:
            code = run.wait_for_end(END_LIMIT_S)
            if code != 0:
                result.problem = drill.complaint(code, run.errors, joined=self._joins)
                result.ended = True
                return
        result.went_on = True

    def _see_it_end(self, run: run_kills.Run, drill: Drill, result: Result) -> None:
        is_patient = drill.fault == "freeze" or (drill.victim == "gcs_server" and self._joins)
        code = run.wait_for_end(PATIENT_END_LIMIT_S if is_patient else END_LIMIT_S)
        run.wait_until_nothing_runs(END_LIMIT_S)  # the watcher may have something to say
        result.problem = drill.complaint(code, run.errors, joined=self._joins)
        if interrupted := INTERRUPTED.search(run.errors):
            result.during = f"{'engine: ' if interrupted[1] else ''}{interrupted[2]}"
        result.ended = not result.problem

    def _look_for_leftovers(self, run: run_kills.Run, result: Result) -> None:
        """Adds what an attempt has left behind; it is reported once."""
        with suppress(AssertionError):
            run.wait_until_nothing_runs(END_LIMIT_S)
        left = [f"process {process.pid}" for process in run.family()]
        if not self._joins:  # nodes go on, with the same folder
            left += [f"orphan {pid}" for pid in run_kills.processes_with("TMPDIR", str(self._temporary))]
        for name in _names(self._temporary):
            path = self._temporary / name
            if name == NODES_FOLDER or name.startswith(CACHE):
                continue  # of nodes that go on; and torch's, of a fixed name
            left.append(str(path))
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        pids = {str(pid) for pid in run.process_ids}
        new = _names(SHARED_MEMORY) - self._shared_memory
        left += [str(SHARED_MEMORY / name) for name in new if set(re.findall(r"\d+", name)) & pids]
        self._shared_memory = _names(SHARED_MEMORY)
        result.left += [item for item in sorted(left) if item not in result.left]


def _signal(victim: psutil.Process, fault: str) -> None:
    number = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP, "pause": signal.SIGSTOP}.get(fault)
    with suppress(psutil.NoSuchProcess):
        victim.send_signal(number if number is not None else signal.Signals[fault])
        if fault == "pause":
            time.sleep(PAUSE_S)
            victim.send_signal(signal.SIGCONT)


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}
