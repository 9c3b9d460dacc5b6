# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The faults of drills: what can be done to a run, in which phase, to which part of it, and what must follow."""

import random
import re
import signal
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from tests.functional.drill_runs import Kind

VITAL = ("worker", "driver", "raylet", "gcs_server")
# What a run says of the death of a part of it; of the driver's, its watcher does. Where one of Ray's servers dies, Ray
# may end the driver before that can.
ENDED_SUDDENLY = r"error: the run's main process \(pid \d+\) ended before it could say why"
ENDED_BY_RAY = rf"{ENDED_SUDDENLY}|error: Ray could not be started"
ENDS_WITH = {
    "worker": r"error: (generation engine \w+: )?(\d of \d workers|worker rank \d) ",
    "driver": ENDED_SUDDENLY,
    "raylet": rf"error: Ray's raylet \(pid |{ENDED_BY_RAY}",
    "gcs_server": rf"error: Ray's gcs_server \(pid |{ENDED_BY_RAY}",
}

FROZEN = r"error: (generation engine \w+: )?worker rank \d .* stopped \(SIGSTOP\); it did not answer"


@dataclass(frozen=True)
class Drill:
    """One thing that is done to a run.

    Attributes:
        phase: When.
        victim: A role of a process, `all` of them, or what is done to the disk.
        fault: kill (SIGKILL), freeze (SIGSTOP for good), pause (SIGSTOP for some seconds), SIGTERM, SIGINT, full or
            vanish.
    """

    phase: str
    victim: str
    fault: str

    @property
    def survived(self) -> bool:
        """True where the run is to go on as if nothing had happened."""
        return self.fault in ("pause", "full", "vanish") or self.victim in ("reward_function", "engine", "watcher")

    def complaint(self, code: int, errors: str, *, joined: bool) -> str:
        """Description of what is wrong with a run's end after the drill; empty where nothing is.

        Args:
            code: The exit code.
            errors: What it has written to stderr.
            joined: True for a run on a Ray cluster that was there before.
        """
        if "Traceback" in errors:
            return "a traceback"
        if code == 0 and self.phase == "end":
            return ""  # it was quicker
        if self.fault in ("SIGTERM", "SIGINT"):
            at_once = 128 + int(signal.Signals[self.fault])
            allowed = (0, at_once) if self.phase in ("start", "reference") else (0,)
            return "" if code in allowed else f"exit code {code}, expected {allowed}"
        if self.survived:
            return f"exit code {code}, and it was to go on"
        expected = -signal.SIGKILL if self.victim == "driver" else 1
        if code != expected:
            return f"exit code {code}, expected {expected}"
        pattern = FROZEN if self.fault == "freeze" else ENDS_WITH[self.victim]
        if joined and self.victim in ("raylet", "gcs_server"):
            pattern = r"error: "
        return "" if re.search(pattern, errors) else f"the message is not {pattern!r}"


def menu(kind: Kind, *, with_disk: bool) -> list[Drill]:
    """Every drill that a kind of run can have.

    Args:
        kind: The kind.
        with_disk: True where a small file system can be mounted.
    """
    return list(dict.fromkeys(_drills(kind, with_disk)))


def _drills(kind: Kind, with_disk: bool) -> Iterator[Drill]:
    loop = [phase for phase in kind.phases if phase not in ("start", "end")]
    for phase in kind.phases:
        for victim in VITAL:
            yield Drill(phase, victim, "kill")
    for phase in ("start", *loop):
        for fault in ("SIGTERM", "SIGINT"):
            yield Drill(phase, "driver", fault)
    yield Drill("train", "watcher", "kill")
    for phase in ("train", "saving", *(phase for phase in ("generation", "calling") if phase in kind.phases)):
        yield Drill(phase, "all", "SIGTERM")
        yield Drill(phase, "worker", "freeze")
        for victim in ("worker", "driver", "raylet", "gcs_server"):
            yield Drill(phase, victim, "pause")
    if kind.uses_vllm:
        for phase in ("generation", "train", "refit", "validation", "saving"):
            yield Drill(phase, "engine", "kill")
        for phase in ("generation", "refit"):
            yield Drill(phase, "engine", "freeze")
            yield Drill(phase, "engine", "pause")
    if kind.scores:
        for phase in ("generation", "scoring", "train"):
            yield Drill(phase, "reward_function", "kill")
        yield Drill("scoring", "reward_function", "pause")
    if kind.caller:  # one that is killed costs its call, so that the run would equal no other
        yield Drill("calling", kind.caller, "pause")
    for phase in ("train", "saving", "validation"):
        if with_disk:
            yield Drill(phase, "disk", "full")
        yield Drill(phase, "checkpoints", "vanish")
        yield Drill(phase, "run folder", "vanish")


def plan(
    kind: Kind,
    seed: int,
    turn: int,
    num_drills: int,
    *,
    with_disk: bool,
    victims: Collection[str] = (),
    phases: Collection[str] = (),
) -> list[Drill]:
    """The drills of a chain: the next ones of the kind's menu, shuffled; those at the end of a run come last.

    Args:
        kind: The kind of run.
        seed: The campaign's.
        turn: How many chains of this kind come before.
        num_drills: Drills of a chain.
        with_disk: True where a small file system can be mounted.
        victims: These alone; none: all.
        phases: These alone; none: all.
    """
    drills: list[Drill] = []
    first = turn * num_drills
    whole = [
        drill
        for drill in menu(kind, with_disk=with_disk)
        if (not victims or drill.victim in victims) and (not phases or drill.phase in phases)
    ]
    for round_number in range((first + num_drills) // len(whole) + 1):
        order = list(whole)
        random.Random(f"{seed} {kind.name} {round_number}").shuffle(order)
        drills += order
    return sorted(drills[first : first + num_drills], key=lambda drill: drill.phase == "end")
