# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Groups of trajectories on their way from a prompt to a training step, and the two ends that they can have."""

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
    """Too old to be trained on."""
    UPDATE = "update"
    """Weights changed while it ran, and `partial` is `discard`."""
    DEADLINE = "deadline"
    """Took too long."""
    FAILED = "failed"
    """Raised an error, or its task was cancelled by somebody else."""
    UNINFORMATIVE = "uninformative"
    """Finished with nothing to learn from: dynamic sampling replaces it by the group of another prompt."""
    STOPPED = "stopped"
    """The run ends."""

    @property
    def is_own_fault(self) -> bool:
        """Return whether the same prompt is likely to fail again."""
        return self in (Reason.DEADLINE, Reason.FAILED)


@dataclass(frozen=True)
class Ticket:
    """Permission to generate the group of one prompt.

    Attributes:
        prompt: The prompt.
        position: Number of the prompt in the order of all epochs. No two groups under way have the same.
        version: Optimizer steps of the weights at its dispatch; of its restart, where it was restarted.
        admitted_version: Optimizer steps of the weights at its admission. Age decides what is too old and what cannot
            be overtaken any more, so that restarts do not put a long group off for ever.
        attempt: Groups of this prompt that were cancelled before.
        num_faults: Those among them whose reason was their own fault.
        lost_s: Seconds of generation that restarts have lost.
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
    """A group that is generated.

    Attributes:
        ticket: Its ticket.
        group: What was made.
        version: Optimizer steps of the weights when it was finished.
        number: Its number in the order of finishing.
    """

    ticket: Ticket
    group: Group
    version: int
    number: int


@dataclass(frozen=True)
class Staleness:
    """Age of a group in optimizer steps when it is trained on.

    Attributes:
        in_flight: Steps while it was generated.
        in_queue: Steps while it waited in the queue.
    """

    in_flight: int
    in_queue: int

    @property
    def total(self) -> int:
        """Return the steps since its dispatch."""
        return self.in_flight + self.in_queue


def staleness(found: Finished, version: int) -> Staleness:
    """Return the age of a group that is trained on at a version."""
    return Staleness(in_flight=found.version - found.ticket.version, in_queue=version - found.version)


@dataclass(frozen=True)
class Cancellation:
    """End of an admitted group that is not trained on.

    Attributes:
        position: Number of its prompt.
        sample_id: Where its prompt came from.
        attempt: Groups of this prompt that were cancelled before.
        reason: Why.
        message: What went wrong, in one line; may be empty.
        lost_s: Seconds of its generation, all of them lost; 0 where an earlier run generated it.
        is_given_up: Its prompt is not generated again.
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
        version: Optimizer steps of the weights that are trained.
        groups: The groups.
        cancelled: Groups that were cancelled since the batch before.
        replaced: Those among them that dynamic sampling has replaced.
        num_filled: Groups of the step that it would have replaced, but for its bound or for want of prompts.
        waited_s: Seconds that the trainer waited for it.
        num_queued: Finished groups that stay in the queue.
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
        """Return the age of each group."""
        return [staleness(found, self.version) for found in self.groups]

    @property
    def is_on_policy(self) -> bool:
        """Return whether the weights that are trained have sampled every token: no group is older."""
        return all(each.total == 0 for each in self.staleness)
