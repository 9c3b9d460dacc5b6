# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Trajectories that run: the task of each, what it waits for, and the steps that count for its time."""

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import ContextVar, copy_context
from typing import Any, TypeVar

from nemo_rl_moe.environments.interface import Fault
from nemo_rl_moe.rollouts.environment import Session
from nemo_rl_moe.rollouts.trajectory import Trajectory
from nemo_rl_moe.rollouts.trajectory_timer import ThreadTime, TrajectoryTimer

Result = TypeVar("Result")
_TIMER: ContextVar[TrajectoryTimer] = ContextVar("timer of a trajectory")


class RunningTrajectory:
    """One trajectory from its start to its end.

    Its task starts in a context of its own, which the tasks that it starts inherit.

    Args:
        session: Its session.
        timer: Its time.
        coroutine: Its code.
        note_change: Called when it ends or begins to wait.
    """

    def __init__(
        self,
        session: Session,
        timer: TrajectoryTimer,
        coroutine: Coroutine[Any, Any, Trajectory],
        note_change: Callable[[], None],
    ):
        self.timer = timer
        self._session, self._note_change = session, note_change
        self._asked: asyncio.Future[Any] | None = None
        self._failed: Trajectory | None = None
        context = copy_context()
        context.run(_TIMER.set, timer)
        self._task = asyncio.get_running_loop().create_task(coroutine, context=context)
        self._task.add_done_callback(self._end)

    async def wait_for(self, asked: "asyncio.Future[Result]") -> Result:
        """Waits for the answer of a pool, which comes when all trajectories wait."""
        if self.has_ended:  # a task that it has left behind
            asked.cancel()
        self._asked = asked
        self._note_change()
        with self.timer.waits_for_others():
            return await asked

    @property
    def has_ended(self) -> bool:
        """Return whether its trajectory is there."""
        return self._failed is not None or (self._task.done() and not self.timer.is_over)

    @property
    def is_running(self) -> bool:
        """Return whether it has neither ended nor waits for a pool."""
        return not self.has_ended and (self._asked is None or self._asked.done())

    def expire(self, reason: str) -> None:
        """Ends it as it is now, as it has taken too long; its code is cancelled, and not waited for."""
        self._failed = self._session.failed(Fault.TIMEOUT, reason)
        self._task.cancel()
        self._end(self._task)

    def check(self) -> None:
        """Raises the error of an environment that is no user's function."""
        if self._failed is None and self._task.done():
            self._task.result()

    @property
    def trajectory(self) -> Trajectory:
        """Return what has come of it; when it has ended."""
        return self._failed if self._failed is not None else self._task.result()

    def _end(self, task: "asyncio.Task[Trajectory]") -> None:
        if self._asked is not None:
            self._asked.cancel()
        if task.done() and not task.cancelled():
            task.exception()  # otherwise asyncio reports one that nobody has asked for
        self._note_change()


class _CountedSteps(Coroutine[Any, Any, Result]):
    """A coroutine whose steps count for a trajectory."""

    def __init__(self, coroutine: Coroutine[Any, Any, Result], thread: ThreadTime, timer: TrajectoryTimer):
        self._coroutine, self._time, self._timer = coroutine, thread, timer

    def send(self, value: Any) -> Any:
        with self._time.step_of(self._timer):
            return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        with self._time.step_of(self._timer):
            return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Any:
        return self._coroutine.__await__()


def task_factory(thread: ThreadTime) -> Callable[..., "asyncio.Task[Any]"]:
    """Return a factory of tasks whose steps count for the trajectory that starts them; a loop uses it for all tasks.

    Args:
        thread: Time of the loop's thread.
    """

    def make(
        loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Result], **options: Any
    ) -> "asyncio.Task[Result]":
        timer = (options.get("context") or copy_context()).get(_TIMER)
        counted = coroutine if timer is None else _CountedSteps(coroutine, thread, timer)
        return asyncio.Task(counted, loop=loop, **options)

    return make
