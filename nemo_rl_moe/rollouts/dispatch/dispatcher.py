# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The dispatcher: generates groups ahead of training, as tasks of one event loop, and hands out batches of them.

Every admitted group reaches its end exactly once: in a batch, or as one cancellation with its reason. Whoever ends a
group takes it out of the live ones first, in the same step of the loop; what comes of its task later does not count.
The loop's clock is the only one.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

from nemo_rl_moe.config.schema_rollouts import Partial
from nemo_rl_moe.errors import GenerationError, UserError, one_line
from nemo_rl_moe.rollouts.dispatch.admission import Admission, Bounds
from nemo_rl_moe.rollouts.dispatch.groups import Batch, Cancellation, Finished, Group, Reason, Ticket
from nemo_rl_moe.rollouts.dispatch.prompts import QueueState, TicketSource
from nemo_rl_moe.rollouts.dispatch.staleness import LiveGroup, StalenessPolicy

FAILURES_IN_A_ROW = 8
"""Prompts that may be given up with no group finished between; those of a whole step, where that is more."""
CLEANUP_S = 5.0
"""Seconds that a cancelled group may take for its end before engines are paused or the run goes on without it."""


@dataclass(frozen=True)
class DynamicSampling:
    """Replacement of groups from which nothing can be learned (DAPO, https://arxiv.org/abs/2503.14476, section 3.2).

    Attributes:
        is_informative: Returns whether a group is worth training on.
        max_groups: Most groups that are generated for a step. At the bound, groups are trained on as they come, so that
            a run continues if all prompts are too easy or too hard.
    """

    is_informative: Callable[[Group], bool]
    max_groups: int


@dataclass
class _Live:
    """A group that runs or waits in the queue.

    Attributes:
        ticket: Its ticket.
        task: Generates it; None: it is finished, or waits for new weights to begin again.
        timer: Ends it at its deadline.
        finished: What came of it; None: it runs.
        started_s: Time at which its generation began; None: it waits for new weights, or an earlier run generated it.
        ended_s: Time at which it was finished.
    """

    ticket: Ticket
    started_s: float | None = None
    ended_s: float | None = None
    task: "asyncio.Task[Group] | None" = None
    timer: asyncio.TimerHandle | None = None
    finished: Finished | None = None

    def seconds(self, now_s: float) -> float:
        """Return the seconds of its generation, restarts included."""
        if self.started_s is None:
            return self.ticket.lost_s
        return self.ticket.lost_s + (now_s if self.ended_s is None else self.ended_s) - self.started_s

    def view(self) -> LiveGroup:
        """Return it as policies see it."""
        number = None if self.finished is None else self.finished.number
        return LiveGroup(self.ticket.position, self.ticket.version, self.ticket.admitted_version, number)


class Dispatcher:
    """Generates groups ahead of training.

    A loop calls, for each step: `next_batch(version)`; then, when it has trained, `update_pending(version + 1)`, pauses
    the engines and updates them, `updated(version + 1)`. Another step may be asked for before that: it waits.

    Args:
        make_group: Generates the group of a ticket. An error cancels the group, or ends the run.
        feed: Gives out tickets.
        policy: Decides what is trained on next, and what is too old.
        partial: Treatment of groups that run when weights change.
        deadline_s: Seconds after which a group is cancelled instead of waited for, pauses of the engines included;
            None: no limit.
        state: Where the run goes on; None: at its start.
        ends_the_run: Says which errors of a group end the run.
        dynamic_sampling: Replaces groups that end with nothing to learn from; None: each is trained on.
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
        self._version, self._is_updating, self._is_stopped = version, False, False
        self._admission = Admission.resumed(policy.bounds, version, finished=len(queue))
        self._live = {found.ticket.position: _Live(found.ticket, finished=found) for found in queue}
        self._num_finished = 1 + max((found.number for found in queue), default=-1)
        self._left_behind: set[asyncio.Task[Group]] = set()
        self._cancelled: list[Cancellation] = []
        self._dynamic_sampling, self._replaced = dynamic_sampling, list[Group]()
        self._given_up_in_a_row = 0
        self._error: Exception | None = None
        self._changed = asyncio.Event()

    @property
    def admission(self) -> Admission:
        """Return the counts of groups."""
        return self._admission

    @property
    def version(self) -> int:
        """Return the optimizer steps of the engines' weights."""
        return self._version

    @property
    def bounds(self) -> Bounds:
        """Return the limits."""
        return self._policy.bounds

    @property
    def is_used_up(self) -> bool:
        """Return whether too few groups are left for another step."""
        return self._admission.live + self._feed.num_left < self._policy.bounds.groups_per_step

    @property
    def running(self) -> list[Ticket]:
        """Return the tickets of groups that are not finished, in the order of their prompts."""
        return [self._live[position].ticket for position in sorted(self._live) if not self._is_finished(position)]

    @property
    def queue(self) -> list[Finished]:
        """Return the finished groups, in the order of their prompts."""
        found = (self._live[position].finished for position in sorted(self._live))
        return [each for each in found if each is not None]

    def state(self, version: int) -> QueueState:
        """Return what a checkpoint keeps between two steps.

        Args:
            version: Optimizer steps of the weights that the checkpoint has.
        """
        return self._feed.state(version, self.running, self.queue)

    def start(self) -> None:
        """Begin to generate, in a running event loop."""
        self._fill()

    async def next_batch(self, version: int) -> Batch | None:
        """Wait for the groups of the next training step; None: too few are left, or the run was stopped.

        A trainer that is ahead of the engines waits for them: otherwise its own weights would count as older than they
        are.

        Args:
            version: Optimizer steps of the weights that are trained.

        Raises:
            GenerationError: Groups fail one after the other.
            Exception: A group raised it, and it ends the run.
            ValueError: The engines are ahead of the trainer.
        """
        began_s = _now()
        if version < self._version:
            raise ValueError(f"version {version} is trained while the engines have {self._version}")
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
                    self._admission.finished,
                )
            await self._changed.wait()

    async def update_pending(self, version: int) -> None:
        """Prepare for new weights, before the engines pause: cancel what they make too old, and wait for its end.

        No group is dispatched until `updated`.

        Args:
            version: Optimizer steps of the weights that come.
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
        """Go on with new weights, which all engines have.

        Args:
            version: Optimizer steps of the weights: a number that is set, so that a second call changes nothing.

        Raises:
            ValueError: They are older than the engines' weights.
        """
        if version < self._version:
            raise ValueError(f"version {version} came after {self._version}")
        self._version, self._is_updating = version, False
        for live in self._live.values():
            if live.task is None and live.finished is None:
                live.ticket = replace(live.ticket, version=version)
                self._launch(live)
        self._fill()
        self._changed.set()

    async def stop(self) -> tuple[Cancellation, ...]:
        """Cancel all groups, those in the queue too, and return the cancellations that no batch had.

        An update that has begun may end afterwards. A state is taken before: afterwards the queue is empty, and its
        prompts count as open.
        """
        self._is_stopped = True
        for live in list(self._live.values()):
            self._cancel(live, Reason.STOPPED)
        await self._wait_for_left_behind()
        return self._take_cancelled()

    def _fill(self) -> None:
        """Dispatch as many groups as there is capacity for."""
        while not self._holds and self._admission.capacity(self._version):
            ticket = self._feed.next(self._version)
            if ticket is None:
                return
            self._admission = self._admission.admit(self._version)
            live: _Live = _Live(ticket)
            self._live[ticket.position] = live
            self._launch(live)

    @property
    def _holds(self) -> bool:
        return self._is_updating or self._is_stopped or self._error is not None

    def _launch(self, live: _Live) -> None:
        loop = asyncio.get_running_loop()
        live.started_s = loop.time()
        live.task = loop.create_task(self._make_group(live.ticket))
        live.task.add_done_callback(lambda task: self._ending_the_run(lambda: self._end(live, task)))
        if self._deadline_s is not None:
            live.timer = loop.call_later(self._deadline_s, lambda: self._ending_the_run(lambda: self._expire(live)))

    def _ending_the_run(self, callback: Callable[[], None]) -> None:
        """Call back; an error ends the run, instead of being logged by the loop while the trainer waits for ever."""
        try:
            callback()
        except Exception as error:
            self._error = self._error or error
            self._changed.set()

    def _end(self, live: _Live, task: "asyncio.Task[Group]") -> None:
        """Note the end of a task: its group is finished or has failed, unless somebody has ended it before."""
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
        live.finished = Finished(live.ticket, group, self._version, self._num_finished)
        live.ended_s = _now()
        self._leave_behind(live)
        self._num_finished += 1
        self._given_up_in_a_row = 0
        self._admission = self._admission.finish()
        self._changed.set()
        if self._may_be_replaced and not self._is_informative(group):
            self._replaced.append(group)
            self._cancel(live, Reason.UNINFORMATIVE)

    @property
    def _may_be_replaced(self) -> bool:
        """Return whether another group can take the place of one that has ended, by the bound and the prompts."""
        dynamic, size = self._dynamic_sampling, self._policy.bounds.groups_per_step
        return (
            dynamic is not None
            and size + len(self._replaced) < dynamic.max_groups
            and self._admission.live - 1 + self._feed.num_left >= size
        )

    def _is_informative(self, group: Group) -> bool:
        return self._dynamic_sampling is None or self._dynamic_sampling.is_informative(group)

    def _expire(self, live: _Live) -> None:
        self._cancel(live, Reason.DEADLINE, f"took longer than {self._deadline_s:g} s")
        self._fill()

    def _cancel(self, live: _Live, reason: Reason, message: str = "") -> None:
        """End a group, and take its prompt back."""
        ticket, is_finished = live.ticket, live.finished is not None
        del self._live[ticket.position]
        self._admission = self._admission.reject_finished() if is_finished else self._admission.reject_running()
        self._leave_behind(live)
        is_given_up = reason is not Reason.UNINFORMATIVE and self._give_back(ticket, reason, message)
        lost_s = live.seconds(_now())
        self._cancelled.append(
            Cancellation(ticket.position, ticket.prompt.sample_id, ticket.attempt, reason, message, lost_s, is_given_up)
        )
        self._changed.set()

    def _give_back(self, ticket: Ticket, reason: Reason, message: str) -> bool:
        """Give a prompt back; the run ends where many are given up one after the other."""
        try:
            is_given_up = self._feed.give_back(ticket, reason)
        except UserError as error:
            self._error = self._error or error
            return True
        self._given_up_in_a_row += is_given_up
        limit = max(FAILURES_IN_A_ROW, self._policy.bounds.groups_per_step)
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
        """Return the groups of a step, which are no longer in the queue; none: they are not there yet."""
        if self._version < version:
            return ()
        self._cancel_stale(version)
        taken = [self._live.pop(position).finished for position in self._policy.select(self._views(), version)]
        if taken:
            self._admission = self._admission.consume()
        self._fill()
        return tuple(found for found in taken if found is not None)

    def _take_cancelled(self) -> tuple[Cancellation, ...]:
        cancelled, self._cancelled = tuple(self._cancelled), []
        return cancelled

    def _take_replaced(self) -> tuple[Group, ...]:
        replaced, self._replaced = tuple(self._replaced), []
        return replaced

    def _views(self) -> list[LiveGroup]:
        return [self._live[position].view() for position in sorted(self._live)]

    def _is_finished(self, position: int) -> bool:
        return self._live[position].finished is not None

    def _leave_behind(self, live: _Live) -> None:
        """Separate a group from its task, which is cancelled where it still runs, and from its deadline."""
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
