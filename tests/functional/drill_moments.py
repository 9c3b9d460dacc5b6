# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The moments of drills: waiting until a run is in a phase, by what it prints, writes and takes; and its processes."""

import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.functional import run_kills
from tests.functional.drill_faults import Drill
from tests.functional.drill_records import Logs, Reference
from tests.functional.drill_runs import VAL_PERIOD, Kind
from tests.support import agents_of_tests, rewards_of_tests

COMPLETION_LIMIT_S = 900.0
START_LIMIT_S = 400.0
POLL_S = 0.01
LATEST_START_MOMENT_S = 1.5
MOST_PACE = 5.0
LEAST_PACE = 0.5
ANY_ANCHORS = ("checking the model ...", "reading ", "starting Ray ...", "workers ...")
ANCHORS = {
    "worker": ("workers ...",),
    "raylet": ("starting Ray ...", "workers ..."),
    "gcs_server": ("starting Ray ...", "workers ..."),
}
TIMED_AS = {"reference": "reference_logprobs", "scoring": "rewards"}
STEP_LINE = re.compile(r"^step (\d+)/", re.MULTILINE)


def last_step(run: run_kills.Run) -> int:
    """Last step that an attempt has reported for; -1: none."""
    reported = STEP_LINE.findall(run.printed)
    return int(reported[-1]) if reported else -1


@dataclass(frozen=True)
class Notes:
    """Folders in which processes of the attempts leave their ids.

    Attributes:
        scoring: Those that score.
        calling: Those that run tools or agents, with a text while they do.
    """

    scoring: Path
    calling: Path

    def environment(self) -> dict[str, str]:
        """Return the variables that tell them."""
        return {rewards_of_tests.NOTES: str(self.scoring), agents_of_tests.NOTES: str(self.calling)}

    def is_calling(self, processes: Sequence[psutil.Process]) -> bool:
        """Return whether one of them runs a tool, or an agent that does something between two requests."""
        notes = [self.calling / str(process.pid) for process in processes]
        return any(note.exists() and note.read_text() for note in notes)


def victims_of(run: run_kills.Run, role: str, notes: Notes) -> list[psutil.Process]:
    """The processes of a role, with those that score and those that run tools apart from the ranks.

    Args:
        run: The attempt.
        role: As `Run.find` names it, reward_function, tool or all.
        notes: What tells them apart.
    """
    if role == "all":
        return run.family()
    apart = {
        name: {path.name for path in folder.iterdir()}
        for name, folder in (("reward_function", notes.scoring), ("tool", notes.calling))
    }
    if role in apart:
        return [worker for worker in run.find("worker") if str(worker.pid) in apart[role]]
    others = set().union(*apart.values()) if role == "worker" else set()
    return [process for process in run.find(role) if str(process.pid) not in others]


def _are_busy(workers: Sequence[psutil.Process]) -> bool:
    """True while one of them answers a call: Ray says so in its title."""
    return any(run_kills.title_of(worker).startswith(f"{run_kills.WORKER_TITLE}.call") for worker in workers)


class Moments:
    """Moments of the attempts of one chain.

    Args:
        kind: The kind of run.
        logs: What its attempts leave.
        reference: Its unharmed run, for the times of a step's phases.
        chance: Chooses the moment within a phase.
        notes: As of `victims_of`.
    """

    def __init__(self, kind: Kind, logs: Logs, reference: Reference, chance: random.Random, notes: Notes):
        self._kind, self._logs, self._reference, self._chance, self._notes = kind, logs, reference, chance, notes

    def wait(self, run: run_kills.Run, drill: Drill) -> str:
        """Waits until the drill's phase, and says what was seen of it.

        Raises:
            RunHasEndedError: The attempt was over before.
        """
        if drill.phase == "start":
            return self._wait_in_start(run, drill.victim)
        if drill.phase == "end":
            run.wait_for(lambda: "saving the final weights" in run.printed, COMPLETION_LIMIT_S, POLL_S)
            time.sleep(self._chance.uniform(0.0, 0.05))
            return ""
        if drill.phase == "reference" and "reference" in self._kind.anchors:
            run.wait_for(lambda: self._kind.anchors["reference"] in run.printed, START_LIMIT_S, POLL_S)
            time.sleep(self._chance.uniform(0.0, 0.3))
            return self._kind.anchors["reference"]
        run.wait_for(lambda: "writing to " in run.printed, START_LIMIT_S)
        before = last_step(run)
        if drill.phase == "saving":
            run.wait_for(lambda: last_step(run) > before and self._logs.is_saving(), START_LIMIT_S, POLL_S)
            time.sleep(self._chance.uniform(0.0, 0.1))
            return f"after step {last_step(run)}"
        return self._wait_in_step(run, drill.phase, before)

    def _wait_in_start(self, run: run_kills.Run, victim: str) -> str:
        """Some moment after a line of the start; the victim is there."""
        anchor = self._chance.choice(ANCHORS.get(victim, ANY_ANCHORS))
        latest = self._chance.uniform(0.0, LATEST_START_MOMENT_S)
        run.wait_for(lambda: anchor in run.printed, START_LIMIT_S, POLL_S)
        run.wait_for(lambda: victims_of(run, victim, self._notes), START_LIMIT_S)
        time.sleep(latest)
        return anchor

    def _wait_in_step(self, run: run_kills.Run, phase: str, before: int) -> str:
        """Some moment in a phase of a step, by the mean times of the reference and the pace of the last step."""

        def is_next() -> bool:
            done = last_step(run)
            # The first step of an attempt is slower than the others.
            return done >= before + 2 and (phase != "validation" or (done + 1) % VAL_PERIOD == 0)

        run.wait_for(is_next, START_LIMIT_S, POLL_S)
        if phase == "calling":
            callers = victims_of(run, self._kind.caller, self._notes)
            run.wait_for(lambda: self._notes.is_calling(callers), START_LIMIT_S, POLL_S)
            return f"after step {last_step(run)}"
        pace = (self._logs.last_step_s() or self._reference.step_s) / self._reference.step_s
        start, end = self._reference.window(TIMED_AS.get(phase, phase))
        if phase == "scoring" and not self._kind.repeats:  # at any time, beside training
            reward_functions = victims_of(run, "reward_function", self._notes)
            run.wait_for(lambda: _are_busy(reward_functions), START_LIMIT_S, POLL_S)
            return f"after step {last_step(run)}"
        if self._kind.scores and self._kind.repeats and phase != "generation":
            # Seen, not reckoned: everything after it follows from here.
            scoring_start, scoring_end = self._reference.window("rewards")
            reward_functions = victims_of(run, "reward_function", self._notes)
            run.wait_for(lambda: _are_busy(reward_functions), START_LIMIT_S, POLL_S)
            seen = scoring_start
            if phase != "scoring":
                run.wait_for(lambda: not _are_busy(reward_functions), START_LIMIT_S, POLL_S)
                seen = scoring_end
            start, end = start - seen, end - seen
        moment = start + self._chance.random() * (end - start)
        time.sleep(moment * min(max(pace, LEAST_PACE), MOST_PACE))
        return f"after step {last_step(run)}"
