# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A chain: one run that is struck again and again on its way, started anew each time, and equals an unharmed one."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from tests.functional import run_kills, sft_runs
from tests.functional.drill_faults import Drill
from tests.functional.drill_runs import VAL_PERIOD, Kind, Logs, Reference
from tests.support import drill_reward

START_LIMIT_S = 400.0
END_LIMIT_S = 60.0
FROZEN_END_LIMIT_S = 150.0
COMPLETION_LIMIT_S = 600.0
GOING_ON_LIMIT_S = 90.0
PAUSE_S = 3.0
POLL_S = 0.01
LATEST_START_MOMENT_S = 1.5
DISK_SIZE = "160m"
SHARED_MEMORY = Path("/dev/shm")
ANCHORS = {
    "worker": ("workers ...",),
    "raylet": ("starting Ray ...", "workers ..."),
    "gcs_server": ("starting Ray ...", "workers ..."),
    "template": ("reading ",),
}
STEP_LINE = re.compile(r"^step (\d+)/", re.MULTILINE)
INTERRUPTED = re.compile(r"^error: worker rank \d .*? in `(\w+)`", re.MULTILINE)
NOT_SAVED = "could not be saved"
MOST_RETRIES = 3
CACHE = "torchinductor_"
ANY_ANCHORS = ("checking the model ...", "reading ", "starting Ray ...", "workers ...")


@dataclass
class Result:
    """Outcome of one drill.

    Attributes:
        kind: Kind of run.
        phase: When it was struck.
        victim: What was struck.
        fault: How.
        moment: More about when: the text of the start that it followed.
        during: What a worker's death was told to have interrupted.
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
    """One run, struck by one drill after the other.

    Args:
        kind: The kind of run.
        folder: Of its own; gets `logs` and the outputs of each attempt.
        inputs: Data and model of all kinds.
        num_steps: Steps of the run.
        reference: The unharmed run.
        chance: Chooses victims and moments.
    """

    def __init__(
        self, kind: Kind, folder: Path, inputs: Path, num_steps: int, reference: Reference, chance: random.Random
    ):
        self.kind, self.folder, self.reference, self.chance = kind, folder, reference, chance
        self.num_steps = num_steps
        # Ray's sockets lie in the temporary folder, and their names must be short.
        self._temporary = Path(f"/tmp/d{os.getpid()}")
        self._notes = folder / "scorers"
        for path in (self._temporary, self._notes):
            path.mkdir(parents=True)
        self._disk = folder / "disk"
        self.logs = Logs(self._disk)
        self.command = kind.command(self._disk, inputs, num_steps)
        self._nodes: subprocess.Popen[str] | None = None
        self._address = ""
        self._num_attempts = 0
        self._shared_memory = _names(SHARED_MEMORY)

    @contextmanager
    def opened(self, *, with_disk: bool) -> Iterator["Chain"]:
        """Makes what it needs of the machine, a small file system too, and gives it back."""
        self._disk.mkdir()
        if with_disk:
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_SIZE}", "tmpfs", self._disk], check=True)
        try:
            yield self
        finally:
            self._end_nodes()
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
            if code == 0:
                break
            if results:
                results[-1].problem += f"; the attempt after it ended with exit code {code}"
        is_complete = bool(self.logs.weights())
        for index, result in enumerate(results):
            if result.ended is not None:
                result.went_on = index + 1 < len(results) or is_complete
        return results

    def _strike_while_it_runs(self, run: run_kills.Run, waiting: deque[Drill], results: list[Result]) -> bool:
        """Strikes until a drill has ended the attempt: then True."""
        while waiting:
            try:
                moment = self._wait_for_moment(run, waiting[0])
            except run_kills.RunHasEndedError:
                return False
            drill = waiting.popleft()
            result = Result(self.kind.name, drill.phase, drill.victim, drill.fault, moment)
            results.append(result)
            try:
                self._strike(run, drill, result)
            except AssertionError as error:
                result.problem += f"; {str(error).splitlines()[0]}"
                result.ended = False
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
        environment = {"TMPDIR": str(self._temporary), drill_reward.NOTES: str(self._notes)}
        if self.kind.num_nodes > 1:
            environment["RAY_ADDRESS"] = self._running_nodes()
        self._num_attempts += 1
        folder = self.folder / "attempts" / f"{self._num_attempts}"
        nodes = psutil.Process(self._nodes.pid) if self._nodes is not None else None
        with run_kills.running(self.command, folder, environment, nodes) as run:
            yield run

    def _running_nodes(self) -> str:
        """Address of the Ray nodes, started anew where one of them has died."""
        if self._nodes is not None:
            names = [process.name() for process in sft_runs.running(psutil.Process(self._nodes.pid).children())]
            if names.count("raylet") == self.kind.num_nodes and "gcs_server" in names:
                return self._address
            self._end_nodes()
        self._nodes = subprocess.Popen(
            [sys.executable, "-m", "tests.support.two_nodes", str(self._temporary / "ray")],
            env=sft_runs.environment(),
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._nodes.stdout is not None
        self._address = self._nodes.stdout.readline().strip()
        return self._address

    def _end_nodes(self) -> None:
        if self._nodes is None:
            return
        family = [psutil.Process(self._nodes.pid), *psutil.Process(self._nodes.pid).children(recursive=True)]
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._nodes.wait()
        psutil.wait_procs(family, timeout=END_LIMIT_S)
        shutil.rmtree(self._temporary / "ray", ignore_errors=True)
        self._nodes = None

    def _wait_for_moment(self, run: run_kills.Run, drill: Drill) -> str:
        """Waits until the drill's phase, and says what was seen of it."""
        if drill.phase == "start":
            return self._wait_in_start(run, drill.victim)
        if drill.phase == "end":
            run.wait_for(lambda: "saving the final weights" in run.printed, START_LIMIT_S, POLL_S)
            time.sleep(self.chance.uniform(0.0, 0.05))
            return ""
        if drill.phase == "reference" and "reference" in self.kind.anchors:
            run.wait_for(lambda: self.kind.anchors["reference"] in run.printed, START_LIMIT_S, POLL_S)
            time.sleep(self.chance.uniform(0.0, 0.3))
            return self.kind.anchors["reference"]
        run.wait_for(lambda: "writing to " in run.printed, START_LIMIT_S, POLL_S)
        before = self._last_step(run)
        if drill.phase == "saving":
            run.wait_for(lambda: self._last_step(run) > before and self.logs.is_saving(), START_LIMIT_S, POLL_S)
            time.sleep(self.chance.uniform(0.0, 0.1))
            return f"after step {self._last_step(run)}"
        return self._wait_in_step(run, drill.phase, before)

    def _wait_in_start(self, run: run_kills.Run, victim: str) -> str:
        """Some moment after a line of the start; the victim is there."""
        anchor = self.chance.choice(ANCHORS.get(victim, ANY_ANCHORS))
        latest = self.chance.uniform(0.0, LATEST_START_MOMENT_S)
        run.wait_for(lambda: anchor in run.printed, START_LIMIT_S, POLL_S)
        run.wait_for(lambda: self._victims(run, victim), START_LIMIT_S)
        if victim != "template":  # it is there for a second
            time.sleep(latest)
        return anchor

    def _wait_in_step(self, run: run_kills.Run, phase: str, before: int) -> str:
        """Some moment in a phase of a step, by the mean times of the reference and the pace of the last step."""
        phase = {"reference": "reference_logprobs"}.get(phase, phase)

        def is_next() -> bool:
            done = self._last_step(run)
            # The first step of an attempt is slower than the others.
            return done >= before + 2 and (phase != "validation" or (done + 1) % VAL_PERIOD == 0)

        run.wait_for(is_next, START_LIMIT_S, POLL_S)
        pace = self.logs.last_step_s() / self.reference.step_s
        share = self.chance.random()
        start, end = self.reference.window(phase)
        time.sleep((start + share * (end - start)) * min(max(pace, 0.5), 5.0))
        return f"after step {self._last_step(run)}"

    def _last_step(self, run: run_kills.Run) -> int:
        """Last step that the attempt has told of, its own or that of its checkpoint; -1: none."""
        told = STEP_LINE.findall(run.printed)
        return int(told[-1]) if told else -1

    def _victims(self, run: run_kills.Run, role: str) -> list[psutil.Process]:
        scorers = set(_names(self._notes))
        if role == "all":
            return run.family()
        if role == "scorer":
            return [worker for worker in run.find("worker") if str(worker.pid) in scorers]
        return [process for process in run.find(role) if role != "worker" or str(process.pid) not in scorers]

    def _strike(self, run: run_kills.Run, drill: Drill, result: Result) -> None:
        at = time.monotonic()
        before = self._last_step(run)
        if drill.fault in ("full", "vanish"):
            self._harm_disk(run, drill, result)
        else:
            victims = self._victims(run, drill.victim)
            if drill.phase == "end" and not victims:
                pass  # it was quicker
            else:
                assert victims, f"no {drill.victim}"
                for victim in victims if drill.victim == "all" else [self.chance.choice(victims)]:
                    _signal(victim, drill.fault)
        if drill.survived and result.ended is None:
            self._see_it_go_on(run, drill, result, before)
        else:
            self._see_it_end(run, drill, result)
        result.seconds = round(time.monotonic() - at, 1)

    def _harm_disk(self, run: run_kills.Run, drill: Drill, result: Result) -> None:
        if drill.fault == "full":
            filler = self._disk / "filler"
            with suppress(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(2**16))
            told = run.printed.count(NOT_SAVED)
            try:
                run.wait_for(lambda: run.printed.count(NOT_SAVED) > told, GOING_ON_LIMIT_S)
            finally:
                filler.unlink()
            return
        assert self.logs.run_folder is not None
        gone = self.logs.run_folder if drill.victim == "run folder" else self.logs.run_folder / "checkpoints"
        shutil.rmtree(gone, ignore_errors=True)

    def _see_it_go_on(self, run: run_kills.Run, drill: Drill, result: Result, before: int) -> None:
        """Waits until the attempt has done more than the step in which it was struck, or has come to its end."""
        try:
            run.wait_for(lambda: self._last_step(run) >= min(before + 2, self.num_steps), GOING_ON_LIMIT_S)
        except run_kills.RunHasEndedError:
            code = run.wait_for_end(END_LIMIT_S)
            if code != 0:
                result.problem = drill.complaint(code, run.errors, joined=self.kind.num_nodes > 1)
                result.ended = True
                return
        result.went_on = True

    def _see_it_end(self, run: run_kills.Run, drill: Drill, result: Result) -> None:
        limit_s = FROZEN_END_LIMIT_S if drill.fault == "freeze" else END_LIMIT_S
        code = run.wait_for_end(limit_s)
        result.problem = drill.complaint(code, run.errors, joined=self.kind.num_nodes > 1)
        if interrupted := INTERRUPTED.search(run.errors):
            result.during = interrupted[1]
        run.wait_until_nothing_runs(END_LIMIT_S)
        result.ended = not result.problem

    def _look_for_leftovers(self, run: run_kills.Run, result: Result) -> None:
        """Adds what an attempt has left behind; it is told once."""
        with suppress(AssertionError):
            run.wait_until_nothing_runs(END_LIMIT_S)
        left = [f"process {process.pid}" for process in run.family()]
        for name in _names(self._temporary):
            path = self._temporary / name
            if name == "ray" or name.startswith(CACHE):
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
