# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Prompts of asynchronous rollouts: their order, returned prompts, and their state in a checkpoint.

The position of a data loader is not enough, as prompts are not consumed in the order in which they are taken. A
checkpoint lists each prompt that was taken and not consumed.
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
    """A prompt that was taken and not consumed. Its fields are those of `Ticket`."""

    position: int
    sample_id: str
    attempt: int
    num_faults: int

    @staticmethod
    def of(ticket: Ticket) -> "OpenPrompt":
        return OpenPrompt(ticket.position, ticket.prompt.sample_id, ticket.attempt, ticket.num_faults)


@dataclass(frozen=True)
class QueueState:
    """Prompts and finished groups in a checkpoint between two steps.

    Attributes:
        version: Version (number of optimizer steps) of the weights.
        num_taken: Number of prompts that were taken in all.
        open: Prompts whose groups are generated again.
        given_up: Positions of prompts that are not generated again.
        queue: Finished groups, which are restored.
    """

    version: int
    num_taken: int
    open: tuple[OpenPrompt, ...]
    given_up: tuple[int, ...]
    queue: tuple[Finished, ...]

    @property
    def consumed(self) -> list[int]:
        """Positions of the prompts that were trained on."""
        others = {prompt.position for prompt in self.open} | {found.ticket.position for found in self.queue}
        others |= set(self.given_up)
        return [position for position in range(self.num_taken) if position not in others]

    def keeping(self, is_kept: Callable[[Finished], bool], version: int) -> "QueueState":
        """Return the state at a version without some finished groups. The prompts of these groups are generated again.

        Args:
            is_kept: Returns whether a finished group remains in the queue.
        """
        kept, opened = list[Finished](), list(self.open)
        for found in self.queue:
            if is_kept(found):
                kept.append(found)
            else:
                opened.append(OpenPrompt.of(found.ticket))
        opened.sort(key=lambda prompt: prompt.position)
        return replace(self, version=version, open=tuple(opened), queue=tuple(kept))


def drawn_again(state: QueueState, version: int, is_usable: Callable[[Group], bool]) -> QueueState:
    """Return a state for a run with other settings. Groups on which this run cannot train are generated again.

    Args:
        state: State in a checkpoint.
        version: Version of the checkpoint's weights: the number of its training steps, times this run's optimizer steps
            per training step. If it differs from the state's version, the ages in the queue are meaningless, and all
            groups are generated again.
        is_usable: Returns whether the run can train on a group.
    """
    return state.keeping(lambda found: version == state.version and is_usable(found.group), version)


class TicketSource(Protocol):
    """Source of tickets, the permissions to generate a group: `PromptFeed`, or `ReplayedFeed` in `schedule.py`."""

    @property
    def num_left(self) -> int:
        """Number of prompts whose groups are not dispatched now and may be dispatched later."""
        ...

    def next(self, version: int) -> Ticket | None:
        """Return the next ticket, for engines with weights of this version. None if there is no ticket now."""
        ...

    def give_back(self, ticket: Ticket, reason: Reason) -> bool:
        """Take back the prompt of a cancelled group. Return whether the prompt is given up."""
        ...

    def state(self, version: int, running: Sequence[Ticket], queue: Sequence[Finished]) -> QueueState:
        """Return the state for a checkpoint whose weights have this version."""
        ...

    def restore(self, state: QueueState) -> None:
        """Continue from a state. Called before the first `next`."""
        ...


class PromptFeed:
    """A `TicketSource` of the prompts of all epochs. Returned prompts come first, in the order of their positions.

    Args:
        prompts: The prompts of all epochs, from the first one on.
        max_faults: Number of failed or late groups of a prompt after which it is given up.
    """

    def __init__(self, prompts: Iterator[Prompt], num_prompts: int, max_faults: int = 2):
        self._prompts, self._num_prompts, self._max_faults = prompts, num_prompts, max_faults
        self._num_taken = 0
        self._returned: dict[int, Ticket] = {}
        self._positions: list[int] = []  # heap of the positions in `_returned`
        self._given_up: list[int] = []

    @property
    def num_left(self) -> int:
        return self._num_prompts - self._num_taken + len(self._returned)

    def next(self, version: int) -> Ticket | None:
        if self._positions:
            back = self._returned.pop(heapq.heappop(self._positions))
            return Ticket(back.prompt, back.position, version, version, back.attempt, back.num_faults)
        if self._num_taken == self._num_prompts:
            return None
        position, prompt = self._take()
        return Ticket(prompt, position, version, version)

    def give_back(self, ticket: Ticket, reason: Reason) -> bool:
        num_faults = ticket.num_faults + reason.is_own_fault
        if num_faults >= self._max_faults:
            self._given_up.append(ticket.position)
            return True
        attempt = ticket.attempt + (reason is not Reason.STOPPED)  # a resumed run generates the same group again
        self._put_back(ticket.prompt, OpenPrompt(ticket.position, ticket.prompt.sample_id, attempt, num_faults))
        return False

    def state(self, version: int, running: Sequence[Ticket], queue: Sequence[Finished]) -> QueueState:
        """Return the state for a checkpoint, in which prompts of running groups are open."""
        tickets = sorted([*running, *self._returned.values()], key=lambda ticket: ticket.position)
        opened = tuple(map(OpenPrompt.of, tickets))
        return QueueState(version, self._num_taken, opened, tuple(self._given_up), tuple(queue))

    def restore(self, state: QueueState) -> None:
        opened = {prompt.position: prompt for prompt in state.open}
        queued = {found.ticket.position: found.ticket.prompt.sample_id for found in state.queue}
        self._given_up = list(state.given_up)
        while self._num_taken < state.num_taken:
            if self._num_taken == self._num_prompts:
                raise CheckpointError(
                    f"the checkpoint's run had taken {state.num_taken} prompts, but this run has only"
                    f" {self._num_prompts}: resume with the same data, or set checkpointing.resume=never"
                )
            position, prompt = self._take()
            expected = opened[position].sample_id if position in opened else queued.get(position, prompt.sample_id)
            if prompt.sample_id != expected:
                raise CheckpointError(
                    f"prompt {position} was {expected} in the checkpoint's run, but is {prompt.sample_id} in this run:"
                    " resume with the same data, or set checkpointing.resume=never"
                )
            if position in opened:
                self._put_back(prompt, opened[position])

    def _take(self) -> tuple[int, Prompt]:
        prompt = next(self._prompts)
        self._num_taken += 1
        return self._num_taken - 1, prompt

    def _put_back(self, prompt: Prompt, opened: OpenPrompt) -> None:
        self._returned[opened.position] = Ticket(prompt, opened.position, 0, 0, opened.attempt, opened.num_faults)
        heapq.heappush(self._positions, opened.position)
