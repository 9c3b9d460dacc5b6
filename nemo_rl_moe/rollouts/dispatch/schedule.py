# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Schedules of asynchronous runs: a file with the groups of each step, and repetition of a run from it.

A repeated run generates each group with the weights of the version at which it was dispatched, and finishes it before
the weights change. Repetitions are equal to the bit if the engine is deterministic. They equal the recorded run if no
group was generated across an update.
"""

import json
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path

from pydantic import NonNegativeInt, TypeAdapter, ValidationError

from nemo_rl_moe.data.prompts import Prompt
from nemo_rl_moe.errors import DataError, UserError
from nemo_rl_moe.rollouts.dispatch.admission import Bounds
from nemo_rl_moe.rollouts.dispatch.groups import Batch, Finished, Reason, Ticket
from nemo_rl_moe.rollouts.dispatch.prompts import QueueState
from nemo_rl_moe.rollouts.dispatch.staleness import QueueView, StalenessPolicy


@dataclass(frozen=True)
class ScheduledGroup:
    """A group of a recorded step.

    Attributes:
        position, sample_id: Index and source of its prompt.
        attempt: Number of earlier cancelled groups of this prompt.
        version: Version (number of optimizer steps) of the weights at the dispatch of the group.
        finished_version: Version (number of optimizer steps) of the weights when the group was finished.
    """

    position: NonNegativeInt
    sample_id: str
    attempt: NonNegativeInt
    version: NonNegativeInt
    finished_version: NonNegativeInt


@dataclass(frozen=True)
class ScheduledStep:
    """A recorded training step. `version` is the number of optimizer steps before it."""

    version: NonNegativeInt
    groups: tuple[ScheduledGroup, ...]

    @staticmethod
    def of(batch: Batch) -> "ScheduledStep":
        groups = (
            ScheduledGroup(
                found.ticket.position,
                found.ticket.prompt.sample_id,
                found.ticket.attempt,
                found.ticket.version,
                found.version,
            )
            for found in batch.groups
        )
        return ScheduledStep(batch.version, tuple(groups))


_STEP = TypeAdapter(ScheduledStep)


def line_of(step: ScheduledStep, number: int) -> str:
    """Return a step as a line of a schedule file, with the number of the step in the run."""
    return json.dumps({"step": number} | asdict(step))


def read_schedule(path: Path) -> list[ScheduledStep]:
    """Return the steps of a schedule file. If a resumed run of an old release recorded a step twice, take the last."""
    if path.exists() and not path.is_file():  # a device or a pipe may have no end
        raise DataError(f"{path}: is no plain file; expected schedule.jsonl of an asynchronous run")
    steps: list[ScheduledStep] = []
    for number, line in enumerate(path.read_text(encoding="utf-8-sig", errors="replace").splitlines(), start=1):
        try:
            step = _STEP.validate_json(line, strict=True)
        except ValidationError:
            raise DataError(
                f"{path}:{number}: not a step of a schedule; expected schedule.jsonl of an asynchronous run"
            ) from None
        while steps and steps[-1].version >= step.version:
            steps.pop()
        steps.append(step)
    if not steps:
        raise DataError(f"{path}: has no steps")
    return steps


def replay_policy(schedule: Sequence[ScheduledStep], bounds: Bounds) -> StalenessPolicy:
    """Return the policy that trains on the groups of a schedule, and waits until all dispatched groups are finished.

    Args:
        bounds: Bounds of the run. The largest staleness of the schedule replaces their `max_staleness`.
    """
    _check_steps(schedule, bounds)
    lags = [step.version - group.version for step in schedule for group in step.groups]
    consumed = {step.version: [group.position for group in step.groups] for step in schedule}
    live = defaultdict[int, set[int]](set)
    versions = [step.version for step in schedule]
    for number, step in enumerate(schedule):
        for group in step.groups:
            for version in versions[bisect_left(versions, group.version) : number + 1]:
                live[version].add(group.position)

    def choose(view: QueueView) -> Sequence[int]:
        """Choose the groups of the recorded step, once all groups that were dispatched by then are finished."""
        ready = {group.position for group in view.ready}
        return consumed[view.version] if live[view.version].issubset(ready) else []

    limits = Bounds(
        bounds.groups_per_step, max(lags, default=0), bounds.concurrency, updates_per_step=bounds.updates_per_step
    )
    return StalenessPolicy(choose, limits, on_stale="drop", name="replay of a schedule")


def _check_steps(schedule: Sequence[ScheduledStep], bounds: Bounds) -> None:
    if any(len(step.groups) != bounds.groups_per_step for step in schedule):
        raise DataError(f"the schedule has a step with more or fewer than this run's {bounds.groups_per_step} groups")
    for before, step in pairwise(schedule):
        if step.version != (expected := before.version + bounds.updates_per_step):
            raise DataError(
                f"the schedule trains version {step.version} after {before.version}, expected {expected}: steps are"
                " missing, or have another number of updates than those of this run"
            )
    seen = set[int]()
    for step in schedule:
        for group in step.groups:
            if group.version > step.version or group.position in seen:
                what = "is trained on twice" if group.position in seen else f"is dispatched at version {group.version}"
                raise DataError(
                    f"the schedule's prompt {group.position} {what}, in the step that trains version {step.version}"
                )
            seen.add(group.position)


class ReplayedFeed:
    """A `TicketSource` that permits the groups of a schedule to run, each at its recorded version.

    Args:
        schedule: The recorded steps, from version 0 on.
        prompts: The prompts of all epochs, from the first one on.
        max_faults: Number of failures or time-outs of a group at which the run ends.
    """

    def __init__(self, schedule: Sequence[ScheduledStep], prompts: Iterator[Prompt], max_faults: int = 2):
        self._schedule, self._max_faults = schedule, max_faults
        self._waiting = deque(_in_order_of_dispatch(schedule))
        needed = {group.position: group.sample_id for group in self._waiting}
        found = zip(range(max(needed, default=-1) + 1), prompts, strict=False)
        self._prompts = {position: prompt for position, prompt in found if position in needed}
        for position, sample_id in needed.items():
            got = self._prompts[position].sample_id if position in self._prompts else "missing"
            if got != sample_id:
                raise DataError(f"the schedule's prompt {position} is {sample_id}; in this run's data it is {got}")
        self._returned: list[Ticket] = []

    @property
    def num_left(self) -> int:
        return len(self._waiting) + len(self._returned)

    def next(self, version: int) -> Ticket | None:
        """Return the ticket of the next group at a version. None if all groups of the version have been dispatched."""
        if self._returned:
            return self._returned.pop(0)
        if not self._waiting or self._waiting[0].version > version:
            return None
        group = self._waiting.popleft()
        return Ticket(self._prompts[group.position], group.position, version, version, group.attempt)

    def give_back(self, ticket: Ticket, reason: Reason) -> bool:
        """Take back the prompt of a cancelled group, to generate the same attempt again.

        Returns:
            False, as no prompt is given up.
        """
        num_faults = ticket.num_faults + reason.is_own_fault
        if num_faults >= self._max_faults:
            raise UserError(
                "the schedule cannot be repeated: the group of its prompt"
                f" {ticket.position} ({ticket.prompt.sample_id}) fails again"
            )
        self._returned.append(replace(ticket, num_faults=num_faults))
        return False

    def state(self, version: int, running: Sequence[Ticket], queue: Sequence[Finished]) -> QueueState:
        """Return the state for a checkpoint: the finished groups. The schedule determines the other prompts."""
        return QueueState(version, num_taken=0, open=(), given_up=(), queue=tuple(queue))

    def restore(self, state: QueueState) -> None:
        """Resume at the step with the state's version. Groups in the queue are not dispatched again."""
        left = _steps_from(self._schedule, state.version)
        if left and left[0].version > state.version:
            raise DataError(f"the schedule begins at version {left[0].version}, and this run at {state.version}")
        queued = {found.ticket.position for found in state.queue}
        self._waiting = deque(group for group in _in_order_of_dispatch(left) if group.position not in queued)


def needed_of(schedule: Sequence[ScheduledStep], state: QueueState) -> QueueState:
    """Return a state whose queue has only the groups that the rest of a schedule trains on."""
    needed = {group.position for step in _steps_from(schedule, state.version) for group in step.groups}
    return replace(state, queue=tuple(found for found in state.queue if found.ticket.position in needed))


def _steps_from(schedule: Sequence[ScheduledStep], version: int) -> list[ScheduledStep]:
    return [step for step in schedule if step.version >= version]


def _in_order_of_dispatch(schedule: Sequence[ScheduledStep]) -> list[ScheduledGroup]:
    groups = (group for step in schedule for group in step.groups)
    return sorted(groups, key=lambda group: (group.version, group.position))
