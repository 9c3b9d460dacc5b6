# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Steady state with lognormal lengths: no length is favoured (A23), and nobody waits beyond a deadline (A8)."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nemo_rl_moe.rollouts.dispatch.dispatcher import Dispatcher
from nemo_rl_moe.rollouts.dispatch.prompts import PromptFeed
from nemo_rl_moe.rollouts.dispatch.staleness import POLICIES, QueueView, StalenessPolicy
from tests.support.clocks_and_disks import run_virtually
from tests.support.quick_list import full
from tests.support.scripted_rollouts import ScriptedRun, Ticket, red_on
from tests.unit.rollouts.dispatch.test_field_bugs_of_ends import in_place_of, started

NUM_STEPS, WARM_UP, GROUPS_PER_STEP = 220, 20, 4
MOST_STANDARD_ERRORS = 4.0
DEADLINE_S = 12.0
"""About one group in seventy takes longer."""


def seconds_of(position: int, attempt: int, seed: int) -> float:
    """Return the seconds of a group: lognormal, of median 1 and mean 1.65; each attempt draws its own."""
    return float(np.random.default_rng([seed, position, attempt]).lognormal(sigma=1.0))


def standard_errors(consumed: set[tuple[int, int]], generated: set[tuple[int, int]], seed: int) -> float:
    """Return the distance of two samples' mean lengths in its standard errors; groups in both cancel out."""
    lengths = {key: seconds_of(*key, seed) for key in consumed | generated}
    means = [np.mean([lengths[key] for key in keys]) for keys in (consumed, generated)]
    in_both = len(consumed & generated) / (len(consumed) * len(generated))
    variance = np.var(list(lengths.values())) * (1 / len(consumed) + 1 / len(generated) - 2 * in_both)
    return float(abs(means[0] - means[1]) / np.sqrt(variance))


async def steady_run(**options: Any) -> tuple[ScriptedRun, list[Ticket], list[Ticket]]:
    """Return a run, and the tickets of what was trained on and of what was begun in the same steps."""
    seconds: Callable[[Ticket], float] = lambda ticket: seconds_of(ticket.position, ticket.attempt, 0)  # noqa: E731
    defaults: dict[str, Any] = {"fates": seconds, "groups_per_step": GROUPS_PER_STEP, "max_staleness": 3}
    run = started(**defaults | {"num_prompts": GROUPS_PER_STEP * (NUM_STEPS + 10)} | options)
    await run.train(WARM_UP)
    num_begun = len(run.dispatched)
    await run.train(NUM_STEPS - WARM_UP)
    return run, [group.ticket for batch in run.batches[WARM_UP:] for group in batch.groups], run.dispatched[num_begun:]


async def distance_at_steady_state(**options: Any) -> float:
    """Return the distance between the lengths of what was trained on and of what was begun in the same steps."""
    run, *tickets = await steady_run(**options)
    consumed, generated = ({(ticket.position, ticket.attempt) for ticket in found} for found in tickets)
    assert len(consumed) == GROUPS_PER_STEP * (NUM_STEPS - WARM_UP)
    assert max(max(lags) for lags in run.lags) <= 3
    return standard_errors(consumed, generated, 0)


@pytest.mark.parametrize("options", [{"target_lag": 1}, full({}), {"partial": "restart"}], ids=str)
@pytest.mark.parametrize("policy", ["in_order", "windowed", "ready_first"])
def test_a23_what_is_trained_on_is_as_long_as_what_is_generated(policy: str, options: dict[str, Any]) -> None:
    """With a target below the bound, short groups overtake long ones."""
    assert run_virtually(distance_at_steady_state(policy=policy, **options)) < MOST_STANDARD_ERRORS


def trains_on_the_shortest(patch: pytest.MonkeyPatch) -> None:
    """Take the shortest of what is finished, and cancel what gets too old."""

    def shortest_first(view: QueueView) -> list[int]:
        lengths = {each.position: seconds_of(each.position, 0, 0) for each in view.ready}
        return sorted(lengths, key=lengths.__getitem__)[: view.num_needed]

    patch.setitem(POLICIES, "windowed", shortest_first)  # type: ignore[arg-type]
    patch.setattr(StalenessPolicy, "_claims", lambda self, groups, version: [(groups, self.bounds.groups_per_step)])


def overtakes_the_due(patch: pytest.MonkeyPatch) -> None:
    """Take whatever is ready, and never wait for what gets too old."""
    patch.setattr(StalenessPolicy, "_claims", lambda self, groups, version: [(groups, self.bounds.groups_per_step)])


def forgets_the_prompts_of_long_groups(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PromptFeed, "give_back", lambda self, ticket, reason: False)
    overtakes_the_due(patch)


@in_place_of(Dispatcher, "updated")
def begins_long_groups_again_for_ever(right: Any, self: Any, version: int) -> None:
    """Count the age of a group from its last restart."""
    right(self, version)
    for live in self._live.values():
        if live.finished is None:
            object.__setattr__(live.ticket, "admitted_version", live.ticket.version)


@red_on(overtakes_the_due, forgets_the_prompts_of_long_groups, begins_long_groups_again_for_ever)
async def test_a23_long_groups_are_not_put_off() -> None:
    distance = await distance_at_steady_state(policy="ready_first", partial="restart")
    assert distance < MOST_STANDARD_ERRORS


def of_position(ticket: Ticket) -> float:
    """Return seconds that are the same in each attempt, of a mean of 4.5."""
    return float(np.e) * seconds_of(ticket.position, 0, 0)


def test_dropping_favours_short_groups_and_its_waste_is_seen() -> None:
    """With `drop` and a small bound the longest groups do not get through until the prompts run out.

    This is what the setting means. The cancellations say what it costs: here more than half of the generation.
    """
    options: dict[str, Any] = {"fates": of_position, "policy": "ready_first", "on_stale": "drop"}
    run, *tickets = run_virtually(steady_run(**options))
    consumed, generated = ([of_position(ticket) for ticket in found] for found in tickets)
    assert np.mean(consumed) < 0.95 * np.mean(generated)
    assert {str(each.reason) for each in run.cancelled} == {"stale"}
    assert sum(each.lost_s for each in run.cancelled) > sum(consumed)


async def test_with_drop_every_prompt_is_trained_on_in_the_end() -> None:
    run = started(of_position, max_staleness=1, policy="ready_first", on_stale="drop", num_prompts=40)
    await run.train()
    assert run.positions == list(range(40))
    assert any(each.reason == "stale" for each in run.cancelled)


@in_place_of(Dispatcher, "update_pending")
async def cancels_what_runs(right: Any, self: Any, version: int) -> None:
    self._partial = "discard"
    await right(self, version)


@red_on(trains_on_the_shortest, cancels_what_runs)
async def test_a23_short_groups_that_are_favoured_are_seen() -> None:
    assert await distance_at_steady_state(policy="windowed") < MOST_STANDARD_ERRORS


async def train_with_deadline(**options: Any) -> ScriptedRun:
    run = started(
        lambda ticket: 2 * seconds_of(ticket.position, 0, 0),
        groups_per_step=GROUPS_PER_STEP,
        num_prompts=400,
        deadline_s=DEADLINE_S,
        **options,
    )
    await run.train()
    await run.stop()
    run.check_each_group_ended_once()
    return run


def has_no_deadline(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Dispatcher, "_expire", lambda self, live: None)


@red_on(has_no_deadline)
async def test_a08_nobody_waits_for_the_slowest_longer_than_the_deadline() -> None:
    """A prompt comes again once, and where it is given up, the step waits for another one."""
    for policy, max_staleness in (("in_order", 0), ("in_order", 2), ("windowed", 2)):
        run = await train_with_deadline(policy=policy, max_staleness=max_staleness)
        late = [each for each in run.cancelled if each.reason == "deadline"]
        given_up = {each.position for each in run.cancelled if each.is_given_up}
        assert given_up
        assert [each.lost_s for each in late] == pytest.approx([DEADLINE_S] * len(late))
        for batch in run.batches:
            num_groups = 1 + sum(each.is_given_up for each in batch.cancelled)
            assert batch.waited_s <= 2 * DEADLINE_S * num_groups
        assert len(run.positions) + len(given_up) > 400 - GROUPS_PER_STEP
