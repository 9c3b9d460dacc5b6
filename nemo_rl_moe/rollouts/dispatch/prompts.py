# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Prompts of asynchronous rollouts: which comes next, which come back, and which of them a checkpoint keeps.

The position of a data loader says nothing here: prompts are consumed in another order than they are taken. A checkpoint
keeps each prompt that was taken and not consumed.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from nemo_rl_moe.data.prompts import Prompt
from nemo_rl_moe.errors import CheckpointError
from nemo_rl_moe.rollouts.dispatch.groups import Finished, Group, Reason, Ticket


@dataclass(frozen=True)
class OpenPrompt:
    """A prompt that was taken and not consumed.

    Attributes:
        position: Its number in the order of all epochs.
        sample_id: Where it came from.
        attempt: Groups of it that were cancelled.
        num_faults: Those among them whose reason was their own fault.
    """

    position: int
    sample_id: str
    attempt: int
    num_faults: int

    @staticmethod
    def of(ticket: Ticket) -> "OpenPrompt":
        """Return the prompt of a ticket."""
        return OpenPrompt(ticket.position, ticket.prompt.sample_id, ticket.attempt, ticket.num_faults)


@dataclass(frozen=True)
class QueueState:
    """Prompts and finished groups that a checkpoint keeps between two steps.

    Attributes:
        version: Optimizer steps of the weights.
        num_taken: Prompts that were ever taken.
        open: Prompts whose groups are generated again.
        given_up: Positions of prompts that are not generated again.
        queue: Groups that are finished; they come back as they are.
    """

    version: int
    num_taken: int
    open: tuple[OpenPrompt, ...]
    given_up: tuple[int, ...]
    queue: tuple[Finished, ...]

    @property
    def consumed(self) -> list[int]:
        """Return the positions of the prompts that were trained on."""
        others = {prompt.position for prompt in self.open} | {found.ticket.position for found in self.queue}
        others |= set(self.given_up)
        return [position for position in range(self.num_taken) if position not in others]

    def keeping(self, is_kept: Callable[[Finished], bool], version: int) -> "QueueState":
        """Return the state in which the other finished groups count as running, at a version."""
        kept, opened = list[Finished](), list(self.open)
        for found in self.queue:
            if is_kept(found):
                kept.append(found)
            else:
                opened.append(OpenPrompt.of(found.ticket))
        opened.sort(key=lambda prompt: prompt.position)
        return replace(self, version=version, open=tuple(opened), queue=tuple(kept))


def drawn_again(state: QueueState, version: int, is_usable: Callable[[Group], bool]) -> QueueState:
    """Return a state for a run with other settings: what it cannot train on counts as running, and is drawn again.

    Args:
        state: As a checkpoint has it.
        version: Optimizer steps by the run's settings; by others the ages in the queue mean something else.
        is_usable: Says which finished groups the run can train on.
    """
    return state.keeping(lambda found: version == state.version and is_usable(found.group), version)


class TicketSource(Protocol):
    """Gives out tickets; `PromptFeed` is one, and `ReplayedFeed` in `schedule.py`."""

    @property
    def num_left(self) -> int:
        """Return the prompts that have no ticket now, and may have one later."""
        ...

    def next(self, version: int) -> Ticket | None:
        """Return the next ticket; None: there is none at this version."""
        ...

    def give_back(self, ticket: Ticket, reason: Reason) -> bool:
        """Take back the prompt of a cancelled group; return whether it is given up."""
        ...

    def state(self, version: int, running: Sequence[Ticket], queue: Sequence[Finished]) -> QueueState:
        """Return what a checkpoint keeps.

        Args:
            version: Optimizer steps of the weights.
            running: Tickets of groups that are generated.
            queue: Finished groups.
        """
        ...

    def restore(self, state: QueueState) -> None:
        """Go on where another one stood, before the first ticket."""
        ...


class PromptFeed:
    """A `TicketSource` of the prompts of all epochs. Prompts that come back go first, in the order of their numbers.

    Args:
        prompts: The prompts of all epochs, from the first one on.
        num_prompts: Number of them.
        max_faults: Groups of a prompt that may fail or take too long; then it is given up.
    """

    def __init__(self, prompts: Iterator[Prompt], num_prompts: int, max_faults: int = 2):
        self._prompts, self._num_prompts, self._max_faults = prompts, num_prompts, max_faults
        self._num_taken = 0
        self._returned: dict[int, Ticket] = {}
        self._positions: list[int] = []  # a heap of those that came back
        self._given_up: list[int] = []

    @property
    def num_left(self) -> int:
        """Return the prompts that have no ticket now, and may have one later."""
        return self._num_prompts - self._num_taken + len(self._returned)

    def next(self, version: int) -> Ticket | None:
        """Return the next ticket; None: no prompt is left."""
        if self._positions:
            back = self._returned.pop(heapq.heappop(self._positions))
            return Ticket(back.prompt, back.position, version, version, back.attempt, back.num_faults)
        if self._num_taken == self._num_prompts:
            return None
        position, prompt = self._take()
        return Ticket(prompt, position, version, version)

    def give_back(self, ticket: Ticket, reason: Reason) -> bool:
        """Take back the prompt of a cancelled group; return whether it is given up, for its own faults."""
        num_faults = ticket.num_faults + reason.is_own_fault
        if num_faults >= self._max_faults:
            self._given_up.append(ticket.position)
            return True
        attempt = ticket.attempt + (reason is not Reason.STOPPED)  # the next run generates it as this one would have
        self._put_back(ticket.prompt, OpenPrompt(ticket.position, ticket.prompt.sample_id, attempt, num_faults))
        return False

    def state(self, version: int, running: Sequence[Ticket], queue: Sequence[Finished]) -> QueueState:
        """Return what a checkpoint keeps: running groups count as prompts that came back."""
        tickets = sorted([*running, *self._returned.values()], key=lambda ticket: ticket.position)
        opened = tuple(OpenPrompt.of(ticket) for ticket in tickets)
        return QueueState(version, self._num_taken, opened, tuple(self._given_up), tuple(queue))

    def restore(self, state: QueueState) -> None:
        """Go on where another one stood, before the first ticket."""
        opened = {prompt.position: prompt for prompt in state.open}
        queued = {found.ticket.position: found.ticket.prompt.sample_id for found in state.queue}
        self._given_up = list(state.given_up)
        while self._num_taken < state.num_taken:
            if self._num_taken == self._num_prompts:
                raise CheckpointError(f"{state.num_taken} prompts were taken, and there are {self._num_prompts} now")
            position, prompt = self._take()
            expected = opened[position].sample_id if position in opened else queued.get(position, prompt.sample_id)
            if prompt.sample_id != expected:
                raise CheckpointError(f"prompt {position} was {expected}, and is {prompt.sample_id} now")
            if position in opened:
                self._put_back(prompt, opened[position])

    def _take(self) -> tuple[int, Prompt]:
        prompt = next(self._prompts)
        self._num_taken += 1
        return self._num_taken - 1, prompt

    def _put_back(self, prompt: Prompt, opened: OpenPrompt) -> None:
        ticket = Ticket(prompt, opened.position, 0, 0, opened.attempt, opened.num_faults)
        self._returned[opened.position] = ticket
        heapq.heappush(self._positions, opened.position)
