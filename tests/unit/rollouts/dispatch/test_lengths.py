# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Lengths of what is trained on: short responses are not favoured (A23 of the list of the field's bugs)."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nemo_rl_moe.rollouts.dispatch.dispatcher import Dispatcher
from nemo_rl_moe.rollouts.dispatch.prompts import PromptFeed
from nemo_rl_moe.rollouts.dispatch.staleness import StalenessPolicy
from tests.support.clocks_and_disks import run_virtually
from tests.support.scripted_rollouts import ScriptedRun, Ticket, red_on
from tests.unit.rollouts.dispatch.test_field_bugs_of_ends import in_place_of

NUM_PROMPTS, WARM_UP, LAST = 700, 50, 650
"""Prompts of a run, and those between which it is at its steady state."""
STEP_S = 1.0


def lognormal_lengths() -> np.ndarray:
    """Return seconds of generation whose longest are some ten times the mean, as those of reasoning models."""
    return np.random.default_rng(0).lognormal(mean=1.0, sigma=1.0, size=NUM_PROMPTS)


async def consumed_lengths(**options: Any) -> tuple[np.ndarray, np.ndarray, ScriptedRun]:
    """Return the lengths of what was trained on and of what was generated at the steady state."""
    lengths = lognormal_lengths()
    seconds: Callable[[Ticket], float] = lambda ticket: float(lengths[ticket.position])  # noqa: E731
    options = {"groups_per_step": 4, "max_staleness": 3, "num_prompts": NUM_PROMPTS, **options}
    run = ScriptedRun(seconds, **options)
    run.dispatcher.start()
    await run.train(LAST // 4, step_s=STEP_S)
    consumed = [position for step in run.consumed for position in step][WARM_UP:]
    generated = sorted({ticket.position for ticket in run.dispatched} - set(range(WARM_UP)))
    return lengths[consumed], lengths[generated], run


def distance(consumed: np.ndarray, generated: np.ndarray) -> float:
    """Return the distance of the means, as a share of the mean that was generated."""
    return float(abs(consumed.mean() / generated.mean() - 1))


@pytest.mark.parametrize("policy", ["in_order", "windowed", "ready_first"])
@pytest.mark.parametrize("partial", ["continue", "restart"])
def test_a23_the_mean_length_consumed_is_that_generated(policy: str, partial: str) -> None:
    consumed, generated, run = run_virtually(consumed_lengths(policy=policy, partial=partial))
    assert distance(consumed, generated) < 0.05
    assert max(max(lags) for lags in run.lags) <= 3


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
    consumed, generated, _ = await consumed_lengths(policy="ready_first", partial="restart")
    assert distance(consumed, generated) < 0.05


def test_dropping_favours_short_groups_and_its_waste_is_seen() -> None:
    """With `drop` and a small bound the longest groups do not get through until the prompts run out.

    This is what the setting means. The cancellations say what it costs: here more than half of the generation.
    """
    consumed, generated, run = run_virtually(consumed_lengths(policy="ready_first", on_stale="drop"))
    assert consumed.mean() < 0.95 * generated.mean()
    assert {str(each.reason) for each in run.cancelled} == {"stale"}
    assert sum(each.lost_s for each in run.cancelled) > consumed.sum()


def test_with_drop_every_prompt_is_trained_on_in_the_end() -> None:
    lengths = lognormal_lengths()[:40]

    async def body() -> ScriptedRun:
        run = ScriptedRun(
            lambda ticket: float(lengths[ticket.position]), max_staleness=1, policy="ready_first", on_stale="drop",
            num_prompts=40,
        )  # fmt: skip
        run.dispatcher.start()
        await run.train()
        return run

    run = run_virtually(body())
    assert run.positions == list(range(40))
    assert any(each.reason == "stale" for each in run.cancelled)
