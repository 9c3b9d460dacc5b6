# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Bugs that other frameworks had with groups that fail, hang, race or get lost, as scripts.

Each fails on its planted bug. The numbers are those of the project's list, as in test_field_bugs_of_versions.py.
"""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

from nemo_rl_moe.rollouts.dispatch.admission import Admission
from nemo_rl_moe.rollouts.dispatch.dispatcher import Dispatcher
from nemo_rl_moe.rollouts.dispatch.groups import Reason
from nemo_rl_moe.rollouts.dispatch.prompts import PromptFeed
from tests.support.clocks_and_disks import run_virtually
from tests.support.scripted_rollouts import STUCK, ScriptedRun, red_on

Patch = pytest.MonkeyPatch
Result = TypeVar("Result")
ALL = list(range(8))


def started(*fates: Any, **options: Any) -> ScriptedRun:
    run = ScriptedRun(*fates, **options)
    run.dispatcher.start()
    return run


def virtually(script: Callable[..., Coroutine[Any, Any, Result]]) -> Callable[..., Result]:
    """Run a script of some arguments in virtual time."""

    @functools.wraps(script)
    def run(*arguments: Any, **options: Any) -> Result:
        return run_virtually(script(*arguments, **options))

    return run


def in_place_of(owner: type, name: str) -> Callable[[Callable[..., Any]], Callable[[Patch], None]]:
    """Make a planted fault of a function. It gets the right method, and then the arguments of the method."""

    def decorate(wrong: Callable[..., Any]) -> Callable[[Patch], None]:
        @functools.wraps(wrong)
        def plant(patch: Patch) -> None:
            right = getattr(owner, name)
            patch.setattr(owner, name, lambda self, *arguments: wrong(right, self, *arguments))

        return plant

    return decorate


def keeps_the_reservation(patch: Patch) -> None:
    patch.setattr(Admission, "reject_running", lambda self: self)


@red_on(keeps_the_reservation)
async def test_a07_a_failed_worker_keeps_no_reservation() -> None:
    """The first group of every prompt fails (NeMo-RL#2651)."""
    run = started(lambda ticket: 1.0 if ticket.attempt else OSError("engine lost"), max_staleness=0)
    assert await run.train() == 4
    assert run.consumed == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert run.reasons() == [(position, "failed") for position in ALL]
    assert {each.message for each in run.cancelled} == {"OSError: engine lost"}
    run.check_each_group_ended_once()


@in_place_of(Dispatcher, "_launch")
def has_no_deadline(right: Any, self: Any, live: Any) -> None:
    self._deadline_s = None
    right(self, live)


def never_gives_up(patch: Patch) -> None:
    patch.setattr(Reason, "is_own_fault", False)


@red_on(has_no_deadline, never_gives_up)
async def test_a08_a_stuck_group_is_waited_for_until_its_deadline() -> None:
    """Prompt 0 hangs, is replaced, and hangs a run that goes on no longer than this one (NeMo-RL#3238)."""
    run = started({0: STUCK}, max_staleness=0, deadline_s=5.0, num_prompts=9)
    await asyncio.sleep(7.0)
    state = run.state()
    assert [(prompt.position, prompt.num_faults) for prompt in state.open] == [(0, 1)]
    assert await run.train() == 4
    assert run.consumed == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert [(each.position, each.reason, each.lost_s, each.is_given_up) for each in run.cancelled] == [
        (0, Reason.DEADLINE, 5.0, False),
        (0, Reason.DEADLINE, 5.0, True),
    ]
    again = started({0: STUCK}, max_staleness=0, deadline_s=5.0, num_prompts=9, state=state)
    assert await again.train() == 4
    assert again.reasons() == [(0, "deadline")]


@in_place_of(Dispatcher, "_end")
def hears_errors_alone(right: Any, self: Any, live: Any, task: Any) -> None:
    if not task.cancelled():
        right(self, live, task)


@red_on(hears_errors_alone)
async def test_a09_a_task_that_somebody_else_cancels_ends_its_group() -> None:
    """A tool cancels the task that runs it (prime-rl#2639)."""
    run = started(lambda ticket: asyncio.CancelledError if (ticket.position, ticket.attempt) == (1, 0) else 1.0)
    assert await run.train() == 4
    assert run.reasons() == [(1, "failed")]
    run.check_each_group_ended_once()


@in_place_of(Dispatcher, "stop")
async def cancels_tasks(right: Any, self: Any) -> Any:
    self._is_stopped = True
    for live in [live for live in self._live.values() if live.task is not None]:
        self._cancel(live, Reason.STOPPED)
    return self._take_cancelled()


@red_on(cancels_tasks)
async def test_a10_a_group_with_nothing_in_flight_is_cancelled_too() -> None:
    """Groups 2 and 3 wait for new weights to begin again; the run is stopped then (prime-rl#3050)."""
    run = started({2: 9.0, 3: 9.0}, partial="restart")
    await run.take()
    await run.dispatcher.update_pending(1)
    assert run.cleaned_up == [2, 3]
    await run.stop()
    run.dispatcher.updated(1)
    assert (run.reasons(), run.dispatcher.running) == ([(2, "stopped"), (3, "stopped")], [])
    run.check_each_group_ended_once()


@in_place_of(Dispatcher, "_take_batch")
def takes_all_that_is_ready(right: Any, self: Any, version: int) -> Any:
    taken = right(self, version)
    for found in self.queue if taken else ():
        del self._live[found.ticket.position]
    return taken


@red_on(takes_all_that_is_ready)
async def test_a11_what_a_step_does_not_need_stays_in_the_queue() -> None:
    """Four groups finish at once, and a step takes two (slime)."""
    run = started(max_staleness=1, policy="windowed")
    await run.take()
    assert run.batches[0].num_queued == 2
    assert [found.ticket.position for found in run.dispatcher.queue] == [2, 3]
    run.check_each_group_ended_once()


@in_place_of(Dispatcher, "_finish")
def has_a_queue_of_one_step(right: Any, self: Any, live: Any, group: Any) -> None:
    if self.admission.finished < 2:
        right(self, live, group)


@red_on(has_a_queue_of_one_step)
async def test_a12_a_full_queue_blocks_nobody() -> None:
    """All that was admitted finishes while the trainer is away (slime)."""
    run = started(max_staleness=2)
    await asyncio.sleep(9.0)
    assert (run.dispatcher.admission.finished, run.dispatcher.admission.running) == (6, 0)
    assert await run.train() == 4


def forgets_prompts(patch: Patch) -> None:
    patch.setattr(PromptFeed, "give_back", lambda self, ticket, reason: False)


@in_place_of(PromptFeed, "give_back")
def returns_prompts_twice(right: Any, self: Any, ticket: Any, reason: Any) -> Any:
    right(self, ticket, reason)
    return right(self, ticket, reason)


@red_on(forgets_prompts, returns_prompts_twice)
async def test_a13_each_prompt_is_trained_on_once() -> None:
    """Updates abort whatever runs; each prompt comes again until it is trained on (slime)."""
    run = started({1: 3.5, 2: 4.5, 3: 1.5}, partial="discard", policy="ready_first", on_stale="drop")
    assert await run.train() == 4
    assert {(1, "update"), (2, "update")} <= set(run.reasons())
    assert run.positions == ALL
    run.check_each_group_ended_once()


@in_place_of(Dispatcher, "_end")
def ends_what_has_ended(right: Any, self: Any, live: Any, task: Any) -> None:
    live.task = task
    right(self, live, task)


@red_on(ends_what_has_ended)
async def test_a15_a_group_that_finishes_while_it_is_swept_ends_once() -> None:
    """Group 1 is made, and before anybody hears of it, new weights make it too old (NeMo-RL `BaseSampler.evict`)."""
    gate = asyncio.Event()
    run = started(
        lambda ticket: gate if (ticket.position, ticket.attempt) == (1, 0) else 1.0,
        groups_per_step=1,
        policy="ready_first",
        on_stale="drop",
    )
    await run.train(1)
    await run.take()
    gate.set()
    await asyncio.sleep(0)  # its task has ended, and the callback of that comes next
    await run.update()
    await run.train()
    assert (run.reasons(), run.cleaned_up) == ([(1, "stale")], []), "it was made, and counts once"
    run.check_each_group_ended_once()


@in_place_of(Dispatcher, "_leave_behind")
def keeps_the_timer(right: Any, self: Any, live: Any) -> None:
    live.timer = None
    right(self, live)


@red_on(keeps_the_timer)
async def test_a16_a_group_cancelled_for_two_reasons_is_replaced_once() -> None:
    """At 4 s group 1 is too old; its deadline is before, at the same time, or behind (verl)."""
    for deadline_s in (3.75, 4.0, 4.25):
        run = started(
            lambda ticket: STUCK if (ticket.position, ticket.attempt) == (1, 0) else 1.0,
            groups_per_step=1,
            policy="ready_first",
            on_stale="drop",
            deadline_s=deadline_s,
        )
        assert await run.train() == 8
        assert [position for position, _ in run.reasons()] == [1]
        assert len(run.dispatched) == 8 + 1
        run.check_each_group_ended_once()
