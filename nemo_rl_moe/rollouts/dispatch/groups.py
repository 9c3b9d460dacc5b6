# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Groups of trajectories from a prompt to a training step or a cancellation."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from nemo_rl_moe.data.prompts import Prompt
from nemo_rl_moe.rollouts.trajectory import Trajectory

Group = list[Trajectory]
"""Trajectories of one prompt."""


class Reason(StrEnum):
    """Reason of a cancellation."""

    STALE = "stale"
    """The group is older than the bound on staleness."""
    UPDATE = "update"
    """Weights changed while the group ran, and `partial` is `discard`."""
    DEADLINE = "deadline"
    """The group took too long."""
    FAILED = "failed"
    """The group raised an error, or other code cancelled its task."""
    UNINFORMATIVE = "uninformative"
    """Nothing can be learned from the group. Dynamic sampling replaces it with the group of another prompt."""
    STOPPED = "stopped"
    """The run ends."""

    @property
    def is_own_fault(self) -> bool:
        """Whether the same prompt is likely to fail again."""
        return self in (Reason.DEADLINE, Reason.FAILED)


@dataclass(frozen=True)
class Ticket:
    """Permission to generate the group of one prompt.

    Attributes:
        position: Index of the prompt in the order of all epochs. It identifies a group that runs or waits in the queue.
        version: Version (number of optimizer steps) of the weights at the dispatch of the group, or at its last
            restart.
        admitted_version: Version (number of optimizer steps) of the weights at the admission of the group. The age for
            policies counts from here, so that restarts do not postpone a long group forever.
        attempt: Number of earlier cancelled groups of this prompt.
        num_faults: Number of earlier groups of this prompt that failed or took too long.
        lost_s: Seconds of generation lost by restarts.
    """

    prompt: Prompt
    position: int
    version: int
    admitted_version: int
    attempt: int = 0
    num_faults: int = 0
    lost_s: float = 0.0


@dataclass(frozen=True)
class Finished:
    """A finished group.

    Attributes:
        version: Version (number of optimizer steps) of the engines' weights when the group was finished.
        number: Index of the group in the order of finishing.
    """

    ticket: Ticket
    group: Group
    version: int
    number: int


@dataclass(frozen=True)
class Staleness:
    """Age of a group in optimizer steps when it is trained on.

    Attributes:
        in_flight: Number of steps while the group was generated.
        in_queue: Number of steps while the group waited in the queue.
    """

    in_flight: int
    in_queue: int

    @property
    def total(self) -> int:
        """Number of steps since the dispatch of the group."""
        return self.in_flight + self.in_queue


def staleness(found: Finished, version: int) -> Staleness:
    """Return the age of a group that is trained on at a version."""
    return Staleness(in_flight=found.version - found.ticket.version, in_queue=version - found.version)


@dataclass(frozen=True)
class Cancellation:
    """End of an admitted group that is not trained on.

    Attributes:
        position, sample_id: Index and source of its prompt.
        attempt: Number of earlier cancelled groups of this prompt.
        message: One line on a failure. May be empty.
        lost_s: Seconds of its generation in this run.
        is_given_up: Whether the prompt is given up, so that it is not generated again.
    """

    position: int
    sample_id: str
    attempt: int
    reason: Reason
    message: str
    lost_s: float
    is_given_up: bool


@dataclass(frozen=True)
class Batch:
    """Groups of one training step, in the order of their prompts.

    Attributes:
        version: Version (number of optimizer steps) of the weights that are trained.
        cancelled: Groups that were cancelled since the previous batch.
        replaced: The trajectories of cancelled groups that dynamic sampling has replaced.
        num_filled: Number of uninformative groups that dynamic sampling could not replace, due to its bound or for lack
            of prompts.
        waited_s: Seconds that the trainer waited for the batch.
        num_queued: Number of finished groups that remain in the queue.
    """

    version: int
    groups: tuple[Finished, ...]
    cancelled: tuple[Cancellation, ...] = ()
    replaced: tuple[Group, ...] = ()
    num_filled: int = 0
    waited_s: float = 0.0
    num_queued: int = 0

    @property
    def staleness(self) -> Sequence[Staleness]:
        return [staleness(found, self.version) for found in self.groups]

    @property
    def is_on_policy(self) -> bool:
        """Whether the weights that are trained have sampled every token."""
        return all(each.total == 0 for each in self.staleness)
