# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs that are killed again and again, at seeded random moments, and lose nothing."""

import json
import os
import random
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.functional import grpo_runs, run_kills, sft_runs

pytestmark = [pytest.mark.slow, pytest.mark.drill, pytest.mark.timeout(3600)]

NUM_RANKS = 2
END_LIMIT_S = 30.0
START_LIMIT_S = 200.0
COMPLETION_LIMIT_S = 400.0
ROLES = ("worker", "driver", "raylet", "gcs_server", "supervisor")
# What a run says of the death of a part of it. Of its own, a supervisor can say nothing; and where one of Ray's servers
# dies, Ray may end the driver before that can.
ENDED_BY_RAY = r"main process ended with exit code 1 before it could tell why"
MESSAGES = {
    "worker": r"error: worker rank \d ",
    "driver": r"error: the run's main process was killed by SIGKILL",
    "raylet": rf"error: Ray's raylet \(pid |{ENDED_BY_RAY}",
    "gcs_server": rf"error: Ray's gcs_server \(pid |{ENDED_BY_RAY}",
    "supervisor": "",
}


@dataclass(frozen=True)
class KilledRun:
    """A command that is started anew after each kill.

    Attributes:
        command: The command.
        folder: Holds `logs`, and gets the outputs of each attempt.
    """

    command: list[str]
    folder: Path

    @property
    def run_folder(self) -> Path | None:
        """The newest; attempts that are killed before the first checkpoint is whole have others before it."""
        return max((self.folder / "logs").glob("*"), default=None)

    def records(self) -> list[dict[str, Any]]:
        """What is recorded up to now: step and metrics, all but times."""
        if self.run_folder is None or not (path := self.run_folder / "metrics.jsonl").is_file():
            return []
        lines = path.read_text().splitlines(keepends=True)
        records = [json.loads(line) for line in lines if line.endswith("\n")]
        return [
            {"step": record["step"]}
            | {name: value for name, value in record["metrics"].items() if not name.startswith("timing/")}
            for record in records
        ]

    def is_saving(self) -> bool:
        """Whether a checkpoint is being written."""
        return self.run_folder is not None and any(self.run_folder.glob("checkpoints/.*.incomplete"))

    def phase_seconds(self, phase: str) -> tuple[float, float]:
        """Where a phase lies within a step, on the average: seconds after the step's start."""
        assert self.run_folder is not None
        lines = (self.run_folder / "metrics.jsonl").read_text().splitlines()
        timings = [json.loads(line)["metrics"] for line in lines[2:]]
        start = 0.0
        for name in ("generation", "scoring", "logprobs", "train"):
            seconds = sum(record.get(f"timing/{name}/seconds", 0.0) for record in timings) / len(timings)
            if name == phase:
                return start, start + seconds
            start += seconds
        raise AssertionError(phase)


def complete(command: list[str], folder: Path) -> KilledRun:
    """Runs a command to its end, unharmed."""
    with run_kills.running(command, folder / "unharmed") as run:
        assert run.wait_for_end(COMPLETION_LIMIT_S) == 0, run.errors
        run.wait_until_nothing_runs(END_LIMIT_S)
    return KilledRun(command, folder)


Moment = Callable[[KilledRun, run_kills.Run, str, random.Random], None]


def in_the_start(killed: KilledRun, run: run_kills.Run, role: str, chance: random.Random) -> None:
    """Some moment before the first step; a victim is there."""
    run.wait_for(lambda: run.find(role), START_LIMIT_S)
    time.sleep(chance.uniform(0.0, 4.0))


def while_saving(killed: KilledRun, run: run_kills.Run, role: str, chance: random.Random) -> None:
    """While a checkpoint is being written; what the kill before has left of one is gone when a step is done."""
    before = len(killed.records())
    run.wait_for(lambda: len(killed.records()) > before and killed.is_saving(), START_LIMIT_S)
    time.sleep(chance.uniform(0.0, 0.1))


def in_a_phase(reference: KilledRun, phase: str) -> Moment:
    """Some moment that lies in a phase of a step, by the times of the reference."""

    def wait(killed: KilledRun, run: run_kills.Run, role: str, chance: random.Random) -> None:
        before = len(killed.records())
        steps = chance.choice((1, 2))
        run.wait_for(lambda: len(killed.records()) >= before + steps, START_LIMIT_S)
        time.sleep(chance.uniform(*reference.phase_seconds(phase)))

    return wait


def kill_until_complete(killed: KilledRun, moments: list[tuple[str, Moment]], chance: random.Random) -> list[str]:
    """Starts the command again and again, kills a part of it each time, and at last lets it come to its end.

    Returns:
        A line for each kill.
    """
    roles = [ROLES[index % len(ROLES)] for index in range(len(moments))]
    chance.shuffle(roles)
    report = []
    for number, ((phase, moment), role) in enumerate(zip(moments, roles, strict=True)):
        with run_kills.running(killed.command, killed.folder / f"attempt_{number}") as run:
            moment(killed, run, role, chance)
            # The first workers are the ranks; those of the environment are replaced when they die.
            victims = sorted(run.find(role), key=psutil.Process.create_time)[:NUM_RANKS]
            assert victims, f"no {role} to kill {phase}:\n{run.printed}\n{run.errors}"
            os.kill(chance.choice(victims).pid, signal.SIGKILL)
            at = time.monotonic()
            code = run.wait_for_end(END_LIMIT_S)
            run.wait_until_nothing_runs(END_LIMIT_S)
            seconds = time.monotonic() - at
            report.append(f"{role} killed in {phase}: all gone after {seconds:.1f} s, {len(killed.records())} records")
            print(report[-1], flush=True)
            assert seconds < END_LIMIT_S
            assert code == (-signal.SIGKILL if role == "supervisor" else 1), run.errors
            assert re.search(MESSAGES[role], run.errors), run.errors
            assert "Traceback" not in run.errors, "nothing but what a reader needs"
    with run_kills.running(killed.command, killed.folder / "last") as run:
        assert run.wait_for_end(COMPLETION_LIMIT_S) == 0, run.printed + run.errors
        run.wait_until_nothing_runs(END_LIMIT_S)
    return report


def sft_command(folder: Path, data: Path, **changes: Any) -> list[str]:
    changes |= {
        **sft_runs.only_jsonl(),
        "sft__max_num_steps": 40,
        "sft__val_period": 10,
        "sft__max_num_epochs": 100,
        "checkpointing__save_period": 2,
        "checkpointing__keep_top_k": 2,
    }
    return sft_runs.sft_command(sft_runs.settings(folder, data, **changes))


@pytest.fixture(scope="module")
def additions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sft_runs.make_additions(tmp_path_factory.mktemp("data"), 256, 16)


@pytest.fixture(scope="module")
def sft_reference(additions: Path, tmp_path_factory: pytest.TempPathFactory) -> KilledRun:
    folder = tmp_path_factory.mktemp("reference")
    return complete(sft_command(folder, additions), folder)


def test_sft_killed_18_times(sft_reference: KilledRun, additions: Path, tmp_path: Path) -> None:
    chance = random.Random(0)
    moments: list[tuple[str, Moment]] = [
        *[("the start", in_the_start)] * 5,
        *[("saving", while_saving)] * 6,
        *[("training", in_a_phase(sft_reference, "train"))] * 7,
    ]
    chance.shuffle(moments)
    killed = KilledRun(sft_command(tmp_path, additions), tmp_path)
    kill_until_complete(killed, moments, chance)
    assert killed.records() == sft_reference.records()
    assert [record["step"] for record in killed.records()] == list(range(41))


def test_grpo_killed_14_times(tmp_path: Path) -> None:
    data = grpo_runs.make_prompts(tmp_path / "data", 40)

    def command(folder: Path) -> list[str]:
        changes: dict[str, Any] = {
            **sft_runs.only_jsonl(),
            "grpo__max_num_steps": 30,
            "grpo__max_num_epochs": 10,
            "checkpointing__save_period": 1,
            "checkpointing__keep_top_k": 2,
        }
        return grpo_runs.command(grpo_runs.settings(folder, data, **changes))

    reference = complete(command(tmp_path / "reference"), tmp_path / "reference")
    chance = random.Random(1)
    moments: list[tuple[str, Moment]] = [
        *[("the start", in_the_start)] * 2,
        *[("saving", while_saving)] * 3,
        *[(phase, in_a_phase(reference, phase)) for phase in ("generation", "logprobs", "train")] * 3,
    ]
    chance.shuffle(moments)
    killed = KilledRun(command(tmp_path / "killed"), tmp_path / "killed")
    kill_until_complete(killed, moments, chance)
    assert killed.records() == reference.records()


def test_a_run_restarts_itself(sft_reference: KilledRun, additions: Path, tmp_path: Path) -> None:
    killed = KilledRun(sft_command(tmp_path, additions, cluster__max_restarts=3), tmp_path)
    with run_kills.running(killed.command, tmp_path / "run") as run:
        for number in (1, 2):
            num_records = 8 * number
            run.wait_for(partial(lambda least: len(killed.records()) > least, num_records), START_LIMIT_S)
            os.kill(run.find("worker")[0].pid, signal.SIGKILL)
            run.wait_for(partial(lambda text: text in run.errors, f"restart {number} of 3: "), END_LIMIT_S)
        assert run.wait_for_end(COMPLETION_LIMIT_S) == 0, run.errors
        run.wait_until_nothing_runs(END_LIMIT_S)
        assert run.errors.count("error: worker rank ") == 2
        assert "restart 3" not in run.errors
    assert killed.records() == sft_reference.records()
