# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Trajectories that run: the task of each, what it waits for, and the steps that count for its time."""

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import ContextVar, copy_context
from typing import Any, Literal, TypeVar

from nemo_rl_moe.rewards.interface import Fault
from nemo_rl_moe.rollouts.environment import Session
from nemo_rl_moe.rollouts.trajectory import Trajectory
from nemo_rl_moe.rollouts.trajectory_timer import ThreadTime, TrajectoryTimer

Result = TypeVar("Result")
WaitsFor = Literal["generation", "rewards", "a process"]
_TIMER: ContextVar[TrajectoryTimer] = ContextVar("timer of a trajectory")


class RunningTrajectory:
    """One trajectory from its start to its end.

    Its task starts in a context of its own, which the tasks that it starts inherit.

    Args:
        session: Its session.
        timer: Its time.
        coroutine: Its code.
        note_change: Called when it ends, begins to wait or has its answer.

    Attributes:
        task: Runs its code.
        waits_for: What it waits for now; None: it runs, or waits for something of its own.
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
        self.waits_for: WaitsFor | None = None
        self._asking: asyncio.Task[Any] | None = None
        self._failed: Trajectory | None = None
        self._error: BaseException | None = None
        context = copy_context()
        context.run(_TIMER.set, timer)
        self.task = asyncio.get_running_loop().create_task(coroutine, context=context)
        self.task.add_done_callback(self._end)

    async def wait_for(
        self, what: WaitsFor, answer: Coroutine[Any, Any, Result], then: Callable[[Result], object] = lambda found: None
    ) -> Result:
        """Wait for an answer of the engine or of the reward function, or for a process, whose errors end the run.

        Args:
            what: Kind of the answer.
            answer: Brings it.
            then: Called with it.
        """
        if self.has_ended:  # a task that it has left behind
            answer.close()
            raise asyncio.CancelledError
        self.waits_for, self._asking = what, asyncio.current_task()
        self._note_change()
        try:
            with self.timer.waits_for_others():
                found = await answer
        except Exception as error:
            self._error = error
            raise
        finally:
            self.waits_for = self._asking = None
            self._note_change()
        then(found)
        return found

    @property
    def has_ended(self) -> bool:
        """Return whether its trajectory is there."""
        return self._failed is not None or (self.task.done() and not self.timer.is_over)

    @property
    def has_failed(self) -> bool:
        """Return whether it has ended with a fault of its environment; `check` has raised any error before."""
        return self.has_ended and self.trajectory.fault is not None

    @property
    def is_running(self) -> bool:
        """Return whether it has neither ended nor waits for the engine, the reward function or a free process."""
        return not self.has_ended and self.waits_for is None

    def expire(self, reason: str) -> None:
        """End it as it is now, as it has taken too long; its code is cancelled, and not waited for."""
        self._failed = self._session.failed(Fault.TIMEOUT, reason, truncated_by="time")
        self.task.cancel()
        self._end(self.task)

    def check(self) -> None:
        """Raise the error of the engine or of the reward function, or another one that ends the run."""
        if self._error is not None:
            raise self._error
        if self._failed is None and self.task.done():
            self.task.result()

    @property
    def trajectory(self) -> Trajectory:
        """Return what has come of it; when it has ended."""
        return self._failed if self._failed is not None else self.task.result()

    def _end(self, task: "asyncio.Task[Trajectory]") -> None:
        if self._asking is not None and self._asking is not task:  # a task that it has left behind
            self._asking.cancel()
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
        context = options.get("context")
        timer = (copy_context() if context is None else context).get(_TIMER)
        counted = coroutine if timer is None else _CountedSteps(coroutine, thread, timer)
        return asyncio.Task(counted, loop=loop, **options)

    return make
