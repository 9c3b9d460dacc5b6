# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Bugs that other frameworks had with versions and staleness, as scripts. Each fails on its planted bug.

The numbers A1 to A23 are those of the project's list of them; test_field_bugs_of_ends.py and test_lengths.py have the
others.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from nemo_rl_moe.rollouts.dispatch.admission import Admission, Bounds
from nemo_rl_moe.rollouts.dispatch.dispatcher import Dispatcher
from nemo_rl_moe.rollouts.dispatch.groups import Batch, Staleness
from nemo_rl_moe.rollouts.dispatch.prompts import PromptFeed, QueueState
from nemo_rl_moe.rollouts.dispatch.staleness import QueueView, StalenessPolicy
from tests.support.scripted_rollouts import STUCK, red_on
from tests.unit.rollouts.dispatch.test_field_bugs_of_ends import in_place_of, started

Patch = pytest.MonkeyPatch


def newest_first(view: QueueView) -> Sequence[int]:
    return [group.position for group in view.ready[::-1][: view.num_needed]]


@in_place_of(Dispatcher, "_finish")
def stamps_when_finished(right: Any, self: Any, live: Any, group: Any) -> None:
    live.ticket = replace(live.ticket, version=self.version, admitted_version=self.version)
    right(self, live, group)


@red_on(stamps_when_finished)
async def test_a01_the_version_is_that_of_the_dispatch() -> None:
    """The weights change while group 1 runs (rllm#622)."""
    run = started({0: 0.5, 1: 2.5}, groups_per_step=1, max_staleness=1)
    await run.train(2)
    (late,) = run.batches[1].groups
    assert (late.ticket.position, late.ticket.version, late.version) == (1, 0, 1)
    assert run.batches[1].staleness == [Staleness(in_flight=1, in_queue=0)]


@in_place_of(PromptFeed, "next")
def stamps_with_a_counter_of_prompts(right: Any, self: Any, version: int) -> Any:
    ticket = right(self, version)
    return None if ticket is None else replace(ticket, version=ticket.position // 2)


@red_on(stamps_with_a_counter_of_prompts)
async def test_a02_the_version_is_a_number_of_optimizer_steps() -> None:
    """A counter of prompts runs ahead of the weights (verl#7568)."""
    run = started(max_staleness=1)
    await run.train()
    assert [ticket.version for ticket in run.dispatched] == [0, 0, 0, 0, 1, 1, 2, 2]
    assert run.lags == [[0, 0], [1, 1], [1, 1], [1, 1]]


@in_place_of(Dispatcher, "updated")
def counts_updates(right: Any, self: Any, version: int) -> None:
    right(self, self.version + 1)


@red_on(counts_updates)
async def test_a03_an_update_that_is_reported_twice_counts_once() -> None:
    """Each of two engines reports the same update (prime-rl#1764)."""
    run = started(max_staleness=0)
    await run.take()
    for _ in range(2):
        await run.dispatcher.update_pending(1)
        run.dispatcher.updated(1)
        await asyncio.sleep(0)
    assert (run.dispatcher.version, len(run.dispatched)) == (1, 4)
    with pytest.raises(ValueError, match="weights of version 0 came after version 1"):
        run.dispatcher.updated(0)


@in_place_of(StalenessPolicy, "stale")
def forgets_the_time_in_the_queue(right: Any, self: Any, groups: Any, version: int) -> Any:
    return right(self, [group for group in groups if not group.is_ready], version)


@red_on(forgets_the_time_in_the_queue)
async def test_a04_the_time_in_the_queue_counts() -> None:
    """Group 0 finishes early and is always passed over (prime-rl#2674)."""
    policy = StalenessPolicy(newest_first, Bounds(groups_per_step=1, max_staleness=1), on_stale="drop")
    run = started(groups_per_step=1, max_staleness=1, policy=policy)
    await asyncio.sleep(2.0)
    while await run.take():
        await run.update()
        await asyncio.sleep(2.0)
    assert run.consumed[:2] == [[1], [2]]
    assert (0, "stale") in run.reasons()
    assert max(max(lags) for lags in run.lags) <= 1
    assert run.positions == list(range(8)), "its prompt came again"


def admits_from_zero(patch: Patch) -> None:
    patch.setattr(
        Admission, "resumed", lambda bounds, version, finished=0: Admission(bounds, finished, finished=finished)
    )


@red_on(admits_from_zero)
async def test_a05_a_version_that_jumps_opens_no_admission() -> None:
    """A run goes on at version 100; its counters began at 0 (AReaL#1388)."""
    state: QueueState = QueueState(version=100, num_taken=200, open=(), given_up=(), queue=())
    run = started(max_staleness=1, num_prompts=400, state=state)
    await asyncio.sleep(0)
    assert len(run.dispatched) == (1 + 1) * 2
    await run.train(20)
    assert max(max(lags) for lags in run.lags) <= 1


@in_place_of(PromptFeed, "state")
def loses_the_queue(right: Any, self: Any, version: int, running: Any, queue: Any) -> Any:
    return right(self, version, running, ())


def does_not_count_the_queue(patch: Patch) -> None:
    right = Admission.resumed
    patch.setattr(Admission, "resumed", lambda bounds, version, finished=0: right(bounds, version))


@red_on(loses_the_queue, does_not_count_the_queue)
async def test_a06_a_run_that_goes_on_with_a_full_queue_trains_on_it() -> None:
    """The queue was as full as it gets; the next step's groups are in it (NeMo-RL#3066)."""
    before = started(max_staleness=1)
    await before.train(1)
    await asyncio.sleep(9.0)
    state = before.state()
    assert ([found.group for found in state.queue], state.consumed) == (["2/0", "3/0", "4/0", "5/0"], [0, 1])
    after = started(max_staleness=1, state=state)
    await after.train()
    assert after.consumed == [[2, 3], [4, 5], [6, 7]]
    assert [ticket.position for ticket in after.dispatched] == [6, 7], "what is finished is not generated again"
    assert after.lags == [[1, 1], [1, 1], [1, 1]]


@in_place_of(Dispatcher, "_take_batch")
def does_not_wait_for_the_engines(right: Any, self: Any, version: int) -> Any:
    return right(self, self.version)


@red_on(does_not_wait_for_the_engines)
async def test_a14_a_trainer_ahead_of_the_engines_waits_for_them() -> None:
    """The trainer asks for the next step before its weights are published (prime-rl#491, #3050)."""
    run = started(max_staleness=1)
    await run.take(0)
    ahead = asyncio.create_task(run.take(1))
    await asyncio.sleep(5.0)
    assert not ahead.done()
    await run.dispatcher.update_pending(1)
    await asyncio.sleep(5.0)
    assert not ahead.done()
    run.dispatcher.updated(1)
    await ahead
    assert (run.consumed, run.lags, run.batches[1].waited_s) == ([[0, 1], [2, 3]], [[0, 0], [1, 1]], 10.0)
    with pytest.raises(ValueError, match="weights of version 0 are trained, but the engines already have 1"):
        await run.take(0)


def looks_at_the_newest_group(patch: Patch) -> None:
    patch.setattr(Batch, "is_on_policy", property(lambda self: min(each.total for each in self.staleness) == 0))


@red_on(looks_at_the_newest_group)
async def test_a19_one_older_group_makes_a_step_off_policy() -> None:
    """One update a step alone does not make the ratio 1."""
    run = started({3: 3.5}, max_staleness=1, policy="windowed", on_stale="drop")
    await run.train(2)
    assert (run.consumed, run.lags) == ([[0, 1], [2, 4]], [[0, 0], [1, 0]])
    assert [batch.is_on_policy for batch in run.batches] == [True, False]


@in_place_of(Dispatcher, "update_pending")
async def aborts_what_runs(right: Any, self: Any, version: int) -> None:
    self._partial = "restart"
    await right(self, version)


@red_on(aborts_what_runs)
async def test_a22_an_update_alone_aborts_nothing() -> None:
    """Group 3 runs over three updates and is not too old (miles#2589)."""
    run = started({3: 5.0}, max_staleness=3, policy="ready_first")
    await run.train()
    assert (run.cleaned_up, run.cancelled) == ([], [])
    assert len(run.dispatched) == 8
    (late,) = [found for batch in run.batches for found in batch.groups if found.ticket.position == 3]
    assert (late.ticket.version, late.version) == (0, 3)


@in_place_of(StalenessPolicy, "stale")
def sweeps_only_what_is_ready(right: Any, self: Any, groups: Any, version: int) -> Any:
    return right(self, [group for group in groups if group.is_ready], version)


@red_on(sweeps_only_what_is_ready)
async def test_the_stale_have_ended_before_the_engines_pause() -> None:
    """Groups that new weights make too old are cancelled, and cleaned up, when `update_pending` returns."""
    run = started({1: STUCK}, groups_per_step=1, max_staleness=1, policy="ready_first", on_stale="drop")
    await run.train(1)
    await run.take()
    assert run.cleaned_up == []
    await run.dispatcher.update_pending(2)
    assert run.cleaned_up == [1]
    assert [ticket.position for ticket in run.dispatched].count(1) == 1, "it comes again when the weights are there"
    run.dispatcher.updated(2)
    await asyncio.sleep(0)
    assert [(ticket.position, ticket.version) for ticket in run.dispatched if ticket.position == 1] == [(1, 0), (1, 2)]
