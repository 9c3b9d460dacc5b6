# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Random scripts: whatever groups do, each ends once, none is trained on too late, and the run reaches its end."""

import asyncio
from contextlib import suppress
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_moe.errors import GenerationError
from nemo_rl_moe.rollouts.dispatch.dispatcher import FAILURES_IN_A_ROW
from nemo_rl_moe.rollouts.dispatch.groups import Reason, Ticket
from tests.support.clocks_and_disks import run_virtually
from tests.support.quick_list import examples
from tests.support.scripted_rollouts import STUCK, Fate, ScriptedRun
from tests.unit.rollouts.dispatch.test_field_bugs_of_ends import started

DEADLINE_S = 3.0
FATES: st.SearchStrategy[Fate] = st.sampled_from(
    [0.0, 0.5, 1.0, 1.0, 2.0, 2.5, 7.0, OSError("lost"), asyncio.CancelledError]
)
FATES_WITH_DEADLINE: st.SearchStrategy[Fate] = FATES | st.just(STUCK)


@st.composite
def scripts(draw: st.DrawFn) -> dict[str, Any]:
    max_staleness, deadline_s = draw(st.integers(0, 4)), draw(st.sampled_from([None, DEADLINE_S]))
    num_prompts = draw(st.integers(1, 16))
    fates = FATES if deadline_s is None else FATES_WITH_DEADLINE
    of_attempts = draw(st.lists(st.lists(fates, min_size=1, max_size=3), min_size=num_prompts, max_size=num_prompts))

    def fate(ticket: Ticket) -> Fate:
        of_prompt = of_attempts[ticket.position]
        return of_prompt[ticket.attempt % len(of_prompt)]

    return {
        "fates": fate,
        "groups_per_step": draw(st.integers(1, 3)),
        "max_staleness": max_staleness,
        "concurrency": draw(st.none() | st.integers(1, 5)),
        "target_lag": draw(st.none() | st.integers(0, max_staleness)),
        "updates_per_step": draw(st.integers(1, 2)),
        "policy": draw(st.sampled_from(["in_order", "windowed", "ready_first"])),
        "on_stale": draw(st.sampled_from(["drop", "wait"])),
        "partial": draw(st.sampled_from(["continue", "restart", "discard"])),
        "deadline_s": deadline_s,
        "num_prompts": num_prompts,
    }


TIMES = st.sampled_from([0.0, 0.5, 1.0, 3.0])


async def train_to_the_end(run: ScriptedRun, step_s: float, update_s: float, stop_after: int | None = None) -> bool:
    """Train until the prompts end, or so many steps and into an update; return whether no failures ended it before."""
    run.dispatcher.start()
    try:
        if stop_after is None:
            await run.train(step_s=step_s, update_s=update_s)
        else:
            await run.train(stop_after, step_s, update_s)
            if await run.take() is not None:
                await run.dispatcher.update_pending(run.dispatcher.version + run.bounds.updates_per_step)
    except GenerationError:
        return False
    return True


def check_bounds(run: ScriptedRun, on_stale: str) -> None:
    bounds = run.bounds
    for batch in run.batches:
        assert len(batch.groups) == bounds.groups_per_step
        assert all(0 <= each.total <= bounds.max_staleness for each in batch.staleness)
        assert all(each.in_flight >= 0 and each.in_queue >= 0 for each in batch.staleness)
        for found in batch.groups:
            if found.group in run.engine_versions:  # otherwise from the queue of the run before
                assert found.ticket.version == run.engine_versions[found.group]
    if on_stale == "wait":
        assert not any(each.reason is Reason.STALE for each in run.cancelled)
    assert len(run.positions) == len(set(run.positions)), "a prompt was trained on twice"


@settings(deadline=None, max_examples=examples(100))
@given(scripts(), TIMES, TIMES, st.none() | st.integers(0, 4))
def test_each_group_ends_once_and_in_time(
    script: dict[str, Any], step_s: float, update_s: float, stop_after: int | None
) -> None:
    """A run goes on to its end, or is stopped in an update."""

    async def body() -> None:
        run = ScriptedRun(**script)
        has_ended = await train_to_the_end(run, step_s, update_s, stop_after)
        await run.stop()
        assert run.dispatcher.admission.live == 0
        run.check_each_group_ended_once()
        check_bounds(run, script["on_stale"])
        given_up = {each.position for each in run.cancelled if each.is_given_up}
        assert given_up.isdisjoint(run.positions)
        left = script["num_prompts"] - len(run.positions) - len(given_up)
        if has_ended and stop_after is None:
            assert 0 <= left < run.bounds.groups_per_step, "a prompt was lost"
        if not has_ended:
            assert len(given_up) >= FAILURES_IN_A_ROW

    run_virtually(body())


@settings(deadline=None, max_examples=examples(100))
@given(scripts(), TIMES, TIMES, st.integers(0, 4), st.booleans())
def test_a_run_that_goes_on_loses_and_repeats_nothing(
    script: dict[str, Any], step_s: float, update_s: float, steps: int, is_stopped_before: bool
) -> None:
    async def body() -> None:
        before = started(**script)
        with suppress(GenerationError):
            await before.train(steps, step_s, update_s)
        if is_stopped_before:
            await before.stop()
        state = before.state()
        await before.stop()
        assert state.consumed == before.positions
        assert {found.ticket.position for found in state.queue}.isdisjoint(state.consumed)
        after = ScriptedRun(**script, state=state)
        has_ended = await train_to_the_end(after, step_s, update_s)
        await after.stop()
        check_bounds(after, script["on_stale"])
        trained = [*before.positions, *after.positions]
        assert len(trained) == len(set(trained)), "a prompt was trained on twice"
        given_up = set(state.given_up) | {each.position for each in after.cancelled if each.is_given_up}
        if has_ended:
            assert 0 <= script["num_prompts"] - len(trained) - len(given_up) < after.bounds.groups_per_step
        queued = {found.ticket.position for found in state.queue}
        assert queued.isdisjoint({ticket.position for ticket in after.dispatched if ticket.attempt == 0})

    run_virtually(body())


@settings(deadline=None, max_examples=examples(60))
@given(
    st.sampled_from(["windowed", "ready_first"]),
    st.integers(2, 3),
    st.integers(2, 4),
    st.integers(1, 2),
    st.lists(st.sampled_from([0.5, 1.0, 4.5, 9.0]), min_size=24, max_size=24),
)
def test_with_wait_nothing_that_is_overtaken_gets_too_old(
    policy: str, groups_per_step: int, max_staleness: int, updates_per_step: int, seconds: list[float]
) -> None:
    """Many groups of one age run long, and younger ones are finished."""

    async def body() -> None:
        run = started(
            dict(enumerate(seconds)),
            groups_per_step=groups_per_step,
            max_staleness=max_staleness,
            updates_per_step=updates_per_step,
            policy=policy,
            num_prompts=24,
        )
        await run.train()
        assert (run.positions, run.cancelled) == ([*range(24)], [])

    run_virtually(body())


@settings(deadline=None, max_examples=examples(40))
@given(scripts(), TIMES)
def test_in_order_does_not_depend_on_time(script: dict[str, Any], step_s: float) -> None:
    """If no group fails, every step trains on the next prompts, however long each takes."""
    script |= {"policy": "in_order", "deadline_s": None, "partial": "continue"}
    slow_or_fast = script["fates"]

    def fate(ticket: Ticket) -> Fate:
        found = slow_or_fast(ticket)
        return found if isinstance(found, float) and found < STUCK else 1.5

    async def body() -> None:
        run = started(**script | {"fates": fate})
        num_steps = await run.train(step_s=step_s)
        size = run.bounds.groups_per_step
        assert run.consumed == [[*range(step * size, (step + 1) * size)] for step in range(num_steps)]
        assert run.cancelled == []

    run_virtually(body())
