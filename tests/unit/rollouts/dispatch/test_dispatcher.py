# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The dispatcher: groups that run when weights change, the end of a run, and errors that end it."""

import asyncio

import pytest

from nemo_rl_moe.errors import DataError, GenerationError
from nemo_rl_moe.rollouts.dispatch.groups import Reason, Staleness
from tests.support.clocks_and_disks import run_virtually
from tests.support.scripted_rollouts import STUCK, ScriptedRun
from tests.unit.rollouts.dispatch.test_field_bugs_of_ends import started

SLOW = {2: 4.0, 3: 4.0}


async def run_over_an_update(partial: str, **options: object) -> ScriptedRun:
    """Train two steps; groups 2 and 3 run from 0 s on, and the weights change at 2 s."""
    run = started(SLOW, partial=partial, **options)
    await run.train(2)
    return run


async def test_partial_groups_go_on_under_new_weights() -> None:
    run = await run_over_an_update("continue")
    assert (run.consumed[1], run.cleaned_up, run.cancelled) == ([2, 3], [], [])
    assert run.batches[1].staleness == [Staleness(in_flight=1, in_queue=0)] * 2
    assert run.batches[1].waited_s == 2.0


async def test_partial_groups_begin_again_and_keep_their_place() -> None:
    run = await run_over_an_update("restart")
    assert (run.consumed[1], run.cleaned_up, run.cancelled) == ([2, 3], [2, 3], [])
    assert run.batches[1].staleness == [Staleness(in_flight=0, in_queue=0)] * 2
    assert [found.ticket.admitted_version for found in run.batches[1].groups] == [0, 0]
    assert [found.ticket.lost_s for found in run.batches[1].groups] == [2.0, 2.0]
    assert run.batches[1].waited_s == 4.0
    run.check_each_group_ended_once()


async def test_partial_groups_are_discarded_and_their_prompts_come_again() -> None:
    run = await run_over_an_update("discard")
    assert run.reasons() == [(2, "update"), (3, "update")]
    assert (run.consumed[1], run.cleaned_up) == ([2, 3], [2, 3])
    assert [found.ticket.attempt for found in run.batches[1].groups] == [1, 1]
    run.check_each_group_ended_once()


async def test_finished_groups_are_nothing_partial() -> None:
    for partial in ("restart", "discard"):
        run = started(partial=partial)
        await run.train(step_s=1.5)
        assert (run.cancelled, run.cleaned_up, len(run.dispatched)) == ([], [], 8)


async def test_an_update_that_has_begun_may_end_after_the_stop() -> None:
    run = started()
    await run.take()
    await run.dispatcher.update_pending(1)
    await run.stop()
    run.dispatcher.updated(1)
    assert await run.take() is None
    assert (len(run.dispatched), run.dispatcher.admission.live) == (4, 0)


async def test_a_trainer_that_waits_hears_of_the_stop() -> None:
    run = started({0: STUCK})
    waiting = asyncio.create_task(run.take())
    await asyncio.sleep(5.0)
    assert not waiting.done()
    await run.stop()
    assert await waiting is None
    assert run.reasons() == [(0, "stopped"), (1, "stopped"), (2, "stopped"), (3, "stopped")]
    assert [each.lost_s for each in run.cancelled] == [5.0, 1.0, 1.0, 1.0]


def test_a_group_that_does_not_let_itself_be_cancelled_delays_an_update_only_so_long() -> None:
    class Stubborn(ScriptedRun):
        async def make_group(self, ticket: object) -> str:
            try:
                return await super().make_group(ticket)
            except asyncio.CancelledError:
                await asyncio.sleep(100.0)
                return "late"

    async def body() -> None:
        run = Stubborn(SLOW, partial="discard")
        run.dispatcher.start()
        await run.take()
        began_s = asyncio.get_running_loop().time()
        await run.update()
        assert asyncio.get_running_loop().time() - began_s == 5.0
        await run.train()
        await asyncio.sleep(200.0)
        assert "late" not in [found.group for batch in run.batches for found in batch.groups]
        run.check_each_group_ended_once()

    run_virtually(body())


async def test_the_end_of_the_prompts() -> None:
    run = started(num_prompts=5)
    assert not run.dispatcher.is_used_up
    await run.train(2)
    assert run.dispatcher.is_used_up, "one prompt does not fill a step"
    assert await run.take() is None
    await run.stop()
    assert (run.consumed, run.reasons()) == ([[0, 1], [2, 3]], [(4, "stopped")])


async def test_the_users_own_errors_end_the_run_at_once() -> None:
    run = started({3: DataError("prompt 3: its image has changed")})
    with pytest.raises(DataError, match="its image has changed"):
        await run.train()


async def test_engines_that_always_fail_end_the_run() -> None:
    run = started(lambda ticket: OSError("no engine"), num_prompts=1000)
    with pytest.raises(GenerationError, match=r"the groups of 8 prompts failed.*prompt 7: OSError: no engine"):
        await run.train()
    assert len(run.dispatched) < 30


async def test_prompts_that_fail_among_others_do_not() -> None:
    fates = {position: OSError("lost") for position in range(0, 60, 3)}
    run = started(fates, num_prompts=60)
    assert await run.train() == 20
    assert [each.position for each in run.cancelled if each.is_given_up] == sorted(fates)


async def test_what_failed_twice_is_given_up_and_what_was_too_old_is_not() -> None:
    run = started({1: OSError("lost")}, num_prompts=9)
    await run.train()
    assert [(each.attempt, each.reason, each.is_given_up) for each in run.cancelled] == [
        (0, Reason.FAILED, False),
        (1, Reason.FAILED, True),
    ]
    assert run.positions == [0, 2, 3, 4, 5, 6, 7, 8]


async def test_the_target_keeps_the_usual_lag_below_the_bound() -> None:
    run = started(max_staleness=3, target_lag=1, num_prompts=16)
    await run.train()
    assert run.lags == [[0, 0], *[[1, 1]] * 7]
