# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Accounts of an asynchronous run that was hit: each prompt is trained on once an epoch, and its queue comes back.

Time decides what such a run trains on, so that it equals no other run in its numbers.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from nemo_rl_moe.launch.rollouts import SCHEDULE_FILE
from nemo_rl_moe.rollouts.dispatch.saved_queue import FOLDER, JSON_FILE
from nemo_rl_moe.rollouts.dispatch.schedule import ScheduledGroup, ScheduledStep, read_schedule
from tests.functional.drill_records import Logs
from tests.functional.drill_runs import GROUPS_A_STEP, NUM_PROMPTS


@dataclass
class Accounts:
    """What the attempts of one run have trained on, and what each of them found when it began.

    Attributes:
        logs: What the attempts leave.
        queued: Version and attempt of the finished groups that the newest checkpoint had at a restart, by position.
        reopened: Version of that checkpoint, by the positions of prompts whose groups were not finished.
    """

    logs: Logs
    queued: dict[int, tuple[int, int]] = field(default_factory=dict)
    reopened: dict[int, int] = field(default_factory=dict)

    def note_restart(self) -> None:
        """Note the queue with which the next attempt begins; none where no checkpoint is whole."""
        newest = max(
            self.logs.folder.glob(f"logs/*/checkpoints/step_*/{FOLDER}/{JSON_FILE}"), key=_step_of, default=None
        )
        if newest is None:
            self.forget()
            return
        queue = json.loads(newest.read_text())
        for group in queue["groups"]:
            self.queued[group["position"]] = group["version"], group["attempt"]
            self.reopened.pop(group["position"], None)
        for prompt in queue["open"]:
            self.reopened[prompt["position"]] = queue["version"]
            self.queued.pop(prompt["position"], None)

    def forget(self) -> None:
        """Forget all restarts: checkpoints were deleted, and the run may begin anew."""
        self.queued.clear()
        self.reopened.clear()

    def faults(self, num_steps: int, *, lost_until: int | None = None) -> Iterator[str]:
        """Yield what is wrong with a run that has come to its end.

        Args:
            num_steps: Steps of the whole run, which end with an epoch.
            lost_until: Last step whose records may be lost, with a folder that was deleted; None: none was.
        """
        steps = self._schedule(of_all=lost_until is not None)
        first = 0 if lost_until is None else lost_until
        missing = set(range(first, num_steps)) - {step.version for step in steps}
        recorded = [step for step in self.logs.metrics(of_all=lost_until is not None) if step > 0]
        missing |= {step - 1 for step in range(first + 1, num_steps + 1)} - {step - 1 for step in recorded}
        if missing or recorded != sorted(recorded) or len(steps) > num_steps:
            yield f"missing are steps {sorted(step + 1 for step in missing)}, recorded {recorded}"
        groups = {group.position: group for step in steps for group in step.groups}
        times = Counter(group.position for step in steps for group in step.groups)
        if twice := sorted(position for position, number in times.items() if number > 1):
            yield f"trained on twice: {twice}"
        lost = sorted(set(range(GROUPS_A_STEP * num_steps)) - groups.keys())
        if len(lost) > GROUPS_A_STEP * (num_steps - len(steps)):
            yield f"never trained on: {lost}"
        if len({(group.position // NUM_PROMPTS, group.sample_id) for group in groups.values()}) < len(groups):
            yield "a prompt came twice in an epoch"
        yield from self.faults_of_the_queue(groups)
        if not self.logs.weights():
            yield "no final weights"

    def faults_of_the_queue(self, groups: dict[int, ScheduledGroup]) -> Iterator[str]:
        """Yield what the restarts have changed of the queues that they found.

        Args:
            groups: What the run has trained on, by position.
        """
        for position, (version, attempt) in self.queued.items():
            if position in groups and (groups[position].version, groups[position].attempt) != (version, attempt):
                yield f"group {position} of the queue did not come back: {groups[position]}, expected {version}"
        for position, version in self.reopened.items():
            if position in groups and groups[position].version < version:
                yield f"group {position} was not drawn again at version {version}: {groups[position]}"

    def _schedule(self, *, of_all: bool) -> list[ScheduledStep]:
        """Return the steps of the newest folder, or of all, of which the newest one that has a step counts."""
        folders = sorted((self.logs.folder / "logs").glob("exp_*"))
        steps: list[ScheduledStep] = []
        for folder in folders if of_all else folders[-1:]:
            path = folder / SCHEDULE_FILE
            own = read_schedule(path) if path.exists() else []
            steps = [step for step in steps if not own or step.version < own[0].version] + own
        return steps


def _step_of(path: Path) -> int:
    return int(path.parents[1].name.removeprefix("step_"))
