# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The prompts of one round of generation after the other, over all epochs."""

from collections.abc import Iterator
from itertools import islice
from typing import Protocol

from nemo_rl_moe.data.prompts import Prompt


class PromptRounds(Protocol):
    """The prompts of each round of generation; `data.prompts.PromptLoader` is one."""

    def __len__(self) -> int:
        """Rounds of one epoch."""
        ...

    def epoch(self, epoch_index: int) -> Iterator[list[Prompt]]:
        """The rounds of one epoch, counted from 0."""
        ...


class PromptStream:
    """Looks one round ahead, so that a loop knows its last step when it comes.

    Args:
        loader: Gives the rounds of each epoch, at least one.
        num_epochs: Passes over the prompts.
        rounds_taken: Rounds, of all epochs, that a run has taken before.

    Attributes:
        rounds_taken: Rounds taken so far.
    """

    def __init__(self, loader: PromptRounds, num_epochs: int, rounds_taken: int = 0):
        first_epoch, first_round = divmod(rounds_taken, len(loader))
        rounds = (prompts for epoch in range(first_epoch, num_epochs) for prompts in loader.epoch(epoch))
        self._rounds = islice(rounds, first_round, None)
        self._next = next(self._rounds, None)
        self.rounds_taken = rounds_taken

    @property
    def is_used_up(self) -> bool:
        """Whether no prompts are left."""
        return self._next is None

    def take(self) -> list[Prompt]:
        """The prompts of the next round; only while they are not used up."""
        assert self._next is not None
        taken, self._next = self._next, next(self._rounds, None)
        self.rounds_taken += 1
        return taken
