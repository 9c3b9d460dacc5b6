# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The dispatcher, which generates groups ahead of training as tasks of one event loop, and returns batches of them.

Every admitted group ends exactly once, in a batch or as a cancellation with its reason. Code that ends a group removes
it from the live groups in the same iteration of the loop, so that a later result of its task is ignored. All times are
on the loop's clock.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

from nemo_rl_moe.config.schema_rollouts import Partial
from nemo_rl_moe.errors import GenerationError, UserError, one_line
from nemo_rl_moe.rollouts.dispatch.admission import Admission
from nemo_rl_moe.rollouts.dispatch.groups import Batch, Cancellation, Finished, Group, Reason, Ticket
from nemo_rl_moe.rollouts.dispatch.prompts import QueueState, TicketSource
from nemo_rl_moe.rollouts.dispatch.staleness import LiveGroup, StalenessPolicy

FAILURES_IN_A_ROW = 8
"""Number of prompts given up in a row at which the run ends. If a step has more groups, their number is used."""
CLEANUP_S = 5.0
"""Seconds that a cancelled group may take to end before engines are paused or the run continues without it."""


@dataclass(frozen=True)
class DynamicSampling:
    """Replacement of groups from which nothing can be learned (DAPO, https://arxiv.org/abs/2503.14476, section 3.2).

    Attributes:
        is_informative: Returns whether a group is worth training on.
        max_groups: Maximum number of groups that are generated for a step. After that, all groups are trained on, so
            that a run continues if all prompts are too easy or too hard.
    """

    is_informative: Callable[[Group], bool]
    max_groups: int


@dataclass
class _Live:
    """A group that runs or waits in the queue.

    Attributes:
        started_s: Time at which generation began. None if the group waits for new weights, or an earlier run generated
            it.
        ended_s: Time at which the group was finished.
        task: Generates the group. None if it is finished, or waits for new weights to begin again.
        timer: Cancels the group at its deadline.
        finished: The finished group. None while it runs.
    """

    ticket: Ticket
    started_s: float | None = None
    ended_s: float | None = None
    task: "asyncio.Task[Group] | None" = None
    timer: asyncio.TimerHandle | None = None
    finished: Finished | None = None

    def seconds(self, now_s: float) -> float:
        """Return the seconds of the group's generation, including those lost by restarts."""
        if self.started_s is None:
            return self.ticket.lost_s
        return self.ticket.lost_s + (now_s if self.ended_s is None else self.ended_s) - self.started_s

    def view(self) -> LiveGroup:
        number = None if self.finished is None else self.finished.number
        return LiveGroup(self.ticket.position, self.ticket.version, self.ticket.admitted_version, number)


class Dispatcher:
    """Generates groups ahead of training.

    For each step, a loop calls `next_batch(version)` and trains. Then it calls `update_pending(version + 1)`, updates
    the weights of paused engines, and calls `updated(version + 1)`. If it calls `next_batch(version + 1)` before that,
    the call waits.

    Args:
        make_group: Generates the group of a ticket (a prompt with its weight version). An error cancels the group, or
            ends the run.
        policy: Selects the groups of a step, and rejects stale groups.
        partial: Treatment of groups that run when weights change.
        deadline_s: Seconds after which a group is cancelled, pauses of the engines included. None for no limit.
        state: State of the run that is resumed. None at the start of a run.
        ends_the_run: Returns whether an error of a group ends the run.
        dynamic_sampling: Replaces uninformative groups. If None, they are trained on.

    Attributes:
        admission: Counts of groups.
        version: Version (number of optimizer steps) of the engines' weights.
        bounds: Limits on running and waiting groups, from the policy.
    """

    def __init__(
        self,
        make_group: Callable[[Ticket], Coroutine[Any, Any, Group]],
        feed: TicketSource,
        policy: StalenessPolicy,
        *,
        partial: Partial = "continue",
        deadline_s: float | None = None,
        state: QueueState | None = None,
        ends_the_run: Callable[[Exception], bool] = lambda error: isinstance(error, UserError),
        dynamic_sampling: DynamicSampling | None = None,
    ):
        version, queue = 0, tuple[Finished, ...]()
        if state is not None:
            feed.restore(state)
            version, queue = state.version, state.queue
        self._make_group, self._feed, self._policy = make_group, feed, policy
        self._partial, self._deadline_s, self._ends_the_run = partial, deadline_s, ends_the_run
        self._is_updating, self._is_stopped = False, False
        self.version, self.bounds = version, policy.bounds
        self.admission = Admission.resumed(policy.bounds, version, finished=len(queue))
        self._live = {found.ticket.position: _Live(found.ticket, finished=found) for found in queue}
        self._num_finished = 1 + max((found.number for found in queue), default=-1)
        self._left_behind: set[asyncio.Task[Group]] = set()
        self._cancelled: list[Cancellation] = []
        self._dynamic_sampling, self._replaced = dynamic_sampling, list[Group]()
        self._given_up_in_a_row = 0
        self._error: Exception | None = None
        self._changed = asyncio.Event()

    @property
    def is_used_up(self) -> bool:
        """Whether too few groups are left for another step."""
        return self.admission.live + self._feed.num_left < self.bounds.groups_per_step

    @property
    def running(self) -> list[Ticket]:
        """Tickets (prompts with weight versions) of unfinished groups, in the order of the prompts."""
        return [live.ticket for live in self._in_order() if live.finished is None]

    @property
    def queue(self) -> list[Finished]:
        """Finished groups, in the order of their prompts."""
        return [live.finished for live in self._in_order() if live.finished is not None]

    def _in_order(self) -> list[_Live]:
        return [self._live[position] for position in sorted(self._live)]

    def state(self, version: int) -> QueueState:
        """Return the state for a checkpoint between two steps.

        Args:
            version: Version (number of optimizer steps) of the checkpoint's weights.
        """
        return self._feed.state(version, self.running, self.queue)

    def start(self) -> None:
        """Begin to generate, in a running event loop."""
        self._fill()

    async def next_batch(self, version: int) -> Batch | None:
        """Wait for the groups of the next training step. Return None if too few are left, or the run was stopped.

        A trainer that is ahead of the engines waits until they have its weights. Otherwise the groups would count as
        older than they are.

        Args:
            version: Version (number of optimizer steps) of the weights that are trained.

        Raises:
            GenerationError: Too many groups in a row have failed.
            Exception: An error of a group that ends the run.
            ValueError: The engines are ahead of the trainer.
        """
        began_s = _now()
        if version < self.version:
            raise ValueError(f"weights of version {version} are trained, but the engines already have {self.version}")
        while True:
            self._changed.clear()
            if self._error is not None:
                raise self._error
            if self._is_stopped or self.is_used_up:
                return None
            if groups := self._take_batch(version):
                return Batch(
                    version,
                    groups,
                    self._take_cancelled(),
                    self._take_replaced(),
                    sum(not self._is_informative(found.group) for found in groups),
                    _now() - began_s,
                    self.admission.finished,
                )
            await self._changed.wait()

    async def update_pending(self, version: int) -> None:
        """Prepare for new weights before the engines pause: cancel groups that become stale, and wait for their end.

        No group is dispatched until `updated`.

        Args:
            version: Version (number of optimizer steps) of the new weights.
        """
        self._is_updating = True
        self._cancel_stale(version)
        running = [live for live in self._live.values() if live.task is not None and not live.task.done()]
        for live in running:
            if self._partial == "discard":
                self._cancel(live, Reason.UPDATE)
            elif self._partial == "restart":
                live.ticket, live.started_s = replace(live.ticket, lost_s=live.seconds(_now())), None
                self._leave_behind(live)
        await self._wait_for_left_behind()

    def updated(self, version: int) -> None:
        """Continue after all engines have got new weights. A second call with the same version has no effect.

        Args:
            version: Version (number of optimizer steps) of the new weights.

        Raises:
            ValueError: The weights are older than the engines' weights.
        """
        if version < self.version:
            raise ValueError(f"weights of version {version} came after version {self.version}")
        self.version, self._is_updating = version, False
        for live in self._live.values():
            if live.task is None and live.finished is None:
                live.ticket = replace(live.ticket, version=version)
                self._launch(live)
        self._fill()
        self._changed.set()

    async def stop(self) -> tuple[Cancellation, ...]:
        """Cancel all groups, including those in the queue. Return the cancellations that no batch has reported.

        After `stop`, `updated` may still be called for a pending update. `state` must not be called any more: `stop`
        empties the queue, so that its prompts would count as not generated.
        """
        self._is_stopped = True
        for live in list(self._live.values()):
            self._cancel(live, Reason.STOPPED)
        await self._wait_for_left_behind()
        return self._take_cancelled()

    def _fill(self) -> None:
        """Dispatch as many groups as may be admitted."""
        while self.admission.capacity(self.version):
            if self._is_updating or self._is_stopped or self._error is not None:
                return
            ticket = self._feed.next(self.version)
            if ticket is None:
                return
            self.admission = self.admission.admit(self.version)
            live = self._live[ticket.position] = _Live(ticket)
            self._launch(live)

    def _launch(self, live: _Live) -> None:
        loop = asyncio.get_running_loop()
        live.started_s = loop.time()
        live.task = loop.create_task(self._make_group(live.ticket))
        live.task.add_done_callback(lambda task: self._ending_the_run(self._end, live, task))
        if self._deadline_s is not None:
            live.timer = loop.call_later(self._deadline_s, self._ending_the_run, self._expire, live)

    def _ending_the_run(self, callback: Callable[..., None], *args: Any) -> None:
        """Call a function whose error ends the run.

        The event loop would only log the error, so that the trainer would wait forever.
        """
        try:
            callback(*args)
        except Exception as error:
            self._error = self._error or error
            self._changed.set()

    def _end(self, live: _Live, task: "asyncio.Task[Group]") -> None:
        """Note the end of a task: its group is finished or has failed, unless the group has ended before."""
        error = None if task.cancelled() else task.exception()
        if live.task is not task:
            self._left_behind.discard(task)
            return
        if task.cancelled():
            self._cancel(live, Reason.FAILED, "its task was cancelled")
        elif error is not None:
            if isinstance(error, Exception) and self._ends_the_run(error):
                self._error = self._error or error
            self._cancel(live, Reason.FAILED, one_line(error))
        else:
            self._finish(live, task.result())
        self._fill()

    def _finish(self, live: _Live, group: Group) -> None:
        live.finished = Finished(live.ticket, group, self.version, self._num_finished)
        live.ended_s = _now()
        self._leave_behind(live)
        self._num_finished += 1
        self._given_up_in_a_row = 0
        self.admission = self.admission.finish()
        self._changed.set()
        if self._may_be_replaced and not self._is_informative(group):
            self._replaced.append(group)
            self._cancel(live, Reason.UNINFORMATIVE)

    @property
    def _may_be_replaced(self) -> bool:
        """Whether dynamic sampling may replace a finished group by a new one.

        Fewer than `max_groups` groups must have been generated for the step, and enough groups and prompts must be left
        for it.
        """
        dynamic, size = self._dynamic_sampling, self.bounds.groups_per_step
        return (
            dynamic is not None
            and size + len(self._replaced) < dynamic.max_groups
            and self.admission.live - 1 + self._feed.num_left >= size
        )

    def _is_informative(self, group: Group) -> bool:
        return self._dynamic_sampling is None or self._dynamic_sampling.is_informative(group)

    def _expire(self, live: _Live) -> None:
        self._cancel(live, Reason.DEADLINE, f"took longer than {self._deadline_s:g} s")
        self._fill()

    def _cancel(self, live: _Live, reason: Reason, message: str = "") -> None:
        """End a group, and return its prompt to the feed."""
        ticket, is_finished = live.ticket, live.finished is not None
        del self._live[ticket.position]
        self.admission = self.admission.reject_finished() if is_finished else self.admission.reject_running()
        self._leave_behind(live)
        is_given_up = reason is not Reason.UNINFORMATIVE and self._give_back(ticket, reason, message)
        lost_s = live.seconds(_now())
        self._cancelled.append(
            Cancellation(ticket.position, ticket.prompt.sample_id, ticket.attempt, reason, message, lost_s, is_given_up)
        )
        self._changed.set()

    def _give_back(self, ticket: Ticket, reason: Reason, message: str) -> bool:
        """Give a prompt back to the feed. Return whether it is given up. End the run if many are given up in a row."""
        try:
            is_given_up = self._feed.give_back(ticket, reason)
        except UserError as error:
            self._error = self._error or error
            return True
        self._given_up_in_a_row += is_given_up
        limit = max(FAILURES_IN_A_ROW, self.bounds.groups_per_step)
        if self._given_up_in_a_row >= limit and self._error is None:
            self._error = GenerationError(
                f"the groups of {self._given_up_in_a_row} prompts failed, and none was finished between them; the last"
                f" one, of {ticket.prompt.sample_id}: {message}"
            )
        return is_given_up

    def _cancel_stale(self, version: int) -> None:
        for position in self._policy.stale(self._views(), version):
            self._cancel(self._live[position], Reason.STALE)

    def _take_batch(self, version: int) -> tuple[Finished, ...]:
        """Remove the groups of a step from the queue and return them. Empty if they have not finished yet."""
        if self.version < version:
            return ()
        self._cancel_stale(version)
        taken = [self._live.pop(position).finished for position in self._policy.select(self._views(), version)]
        if taken:
            self.admission = self.admission.consume()
        self._fill()
        return tuple(found for found in taken if found is not None)

    def _take_cancelled(self) -> tuple[Cancellation, ...]:
        cancelled, self._cancelled = tuple(self._cancelled), []
        return cancelled

    def _take_replaced(self) -> tuple[Group, ...]:
        replaced, self._replaced = tuple(self._replaced), []
        return replaced

    def _views(self) -> list[LiveGroup]:
        return [live.view() for live in self._in_order()]

    def _leave_behind(self, live: _Live) -> None:
        """Separate a group from its deadline and its task, and cancel them."""
        if live.timer is not None:
            live.timer.cancel()
        task, live.task, live.timer = live.task, None, None
        if task is not None and not task.done():
            self._left_behind.add(task)
            task.cancel()

    async def _wait_for_left_behind(self) -> None:
        if self._left_behind:
            await asyncio.wait(self._left_behind, timeout=CLEANUP_S)


def _now() -> float:
    return asyncio.get_running_loop().time()
