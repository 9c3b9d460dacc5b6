# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Admission of groups: how many may run or wait, so that none is too old when it is trained on.

A version is a number of optimizer steps. Staleness is the version that is trained minus the version at which a group
was dispatched, so that time in the queue counts.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Bounds:
    """Limits of asynchronous rollouts.

    Attributes:
        groups_per_step: Number of groups of a training step.
        max_staleness: Maximum number of optimizer steps between the dispatch of a group and its training. 0 for
            synchronous runs.
        concurrency: Maximum number of groups that are generated at the same time. None for no limit.
        target_lag: Number of optimizer steps that generation may run ahead, at most `max_staleness`. None for
            `max_staleness`.
        updates_per_step: Number of optimizer steps of a training step.
    """

    groups_per_step: int
    max_staleness: int = 0
    concurrency: int | None = None
    target_lag: int | None = None
    updates_per_step: int = 1

    def __post_init__(self) -> None:
        concurrency = 1 if self.concurrency is None else self.concurrency
        if min(self.groups_per_step, self.updates_per_step, concurrency) < 1:
            raise ValueError(f"groups, updates and concurrency must be at least 1: {self}")
        if not 0 <= self.lag <= self.max_staleness:
            raise ValueError(f"0 <= target_lag <= max_staleness must hold: {self}")

    @property
    def lag(self) -> int:
        return self.max_staleness if self.target_lag is None else self.target_lag

    def most_admitted(self, version: int) -> int:
        """Return how many groups may have been admitted since version 0 when the weights have this version.

        The number counts groups that were trained on, run or wait in the queue. Training consumes all of them in order,
        at most `lag` (`target_lag`, or `max_staleness` if it is None) optimizer steps after this version.
        """
        return ((version + self.lag) // self.updates_per_step + 1) * self.groups_per_step

    def is_stale(self, since: int, version: int) -> bool:
        """Return whether a group of version `since` is too old to be trained on at `version`."""
        return version - since > self.max_staleness

    def steps_left(self, since: int, version: int) -> int:
        """Return the number of further training steps until a group is too old, if it is not trained on now."""
        return (self.max_staleness - version + since) // self.updates_per_step


@dataclass(frozen=True)
class Admission:
    """Counts of groups. Every admitted group is in exactly one of `running`, `finished`, `rejected` and `consumed`.

    Attributes:
        admitted: Number of groups that were admitted in all.
        running: Number of groups that are generated now.
        finished: Number of groups that wait in the queue.
        rejected: Number of groups that were cancelled while they ran or in the queue.
        consumed: Number of groups that were trained on.
    """

    bounds: Bounds
    admitted: int = 0
    running: int = 0
    finished: int = 0
    rejected: int = 0
    consumed: int = 0

    def __post_init__(self) -> None:
        counts = (self.running, self.finished, self.rejected, self.consumed)
        if min(counts) < 0 or sum(counts) != self.admitted:
            raise ValueError(f"each group must be counted once: {self}")

    @staticmethod
    def resumed(bounds: Bounds, version: int, finished: int = 0) -> "Admission":
        """Return the counts at the start of a run, or of a run resumed after `version` optimizer steps.

        The groups of the earlier steps count as consumed. Otherwise the run would admit that many additional groups at
        once.

        Args:
            finished: Number of groups that are restored into the queue.
        """
        consumed = version // bounds.updates_per_step * bounds.groups_per_step
        return Admission(bounds, admitted=consumed + finished, finished=finished, consumed=consumed)

    @property
    def live(self) -> int:
        """Number of groups that run or wait in the queue."""
        return self.running + self.finished

    def capacity(self, version: int) -> int:
        """Return how many groups may be admitted at a version, at least 0."""
        free = self.bounds.most_admitted(version) - self.consumed - self.live
        if self.bounds.concurrency is not None:
            free = min(free, self.bounds.concurrency - self.running)
        return max(0, free)

    def admit(self, version: int) -> "Admission":
        """Return the counts after the dispatch of a group.

        Raises:
            ValueError: There is no capacity.
        """
        if not self.capacity(version):
            raise ValueError(f"no group can be admitted at version {version}: {self}")
        return replace(self, admitted=self.admitted + 1, running=self.running + 1)

    def finish(self) -> "Admission":
        return replace(self, running=self.running - 1, finished=self.finished + 1)

    def reject_running(self) -> "Admission":
        return replace(self, running=self.running - 1, rejected=self.rejected + 1)

    def reject_finished(self) -> "Admission":
        return replace(self, finished=self.finished - 1, rejected=self.rejected + 1)

    def consume(self) -> "Admission":
        """Return the counts after a training step has taken its groups."""
        count = self.bounds.groups_per_step
        return replace(self, finished=self.finished - count, consumed=self.consumed + count)
