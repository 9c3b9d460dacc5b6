# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs that go on: what a checkpoint keeps, by prompt and not by the position of a loader."""

import asyncio

import pytest

from nemo_rl_moe.errors import CheckpointError
from nemo_rl_moe.rollouts.dispatch.prompts import OpenPrompt, PromptFeed, QueueState, drawn_again
from tests.support.clocks_and_disks import run_virtually
from tests.support.scripted_rollouts import STUCK, ScriptedPrompt, scripted_prompts
from tests.unit.rollouts.dispatch.test_field_bugs_of_ends import started

FATES = {1: 9.0, 3: OSError("lost"), 5: 9.0}


@pytest.fixture
def state() -> QueueState:
    """The state of a run after two steps in which groups overtook each other."""

    async def body() -> QueueState:
        run = started(FATES, policy="windowed", max_staleness=3, num_prompts=12)
        await run.train(2)
        return run.state()

    return run_virtually(body())


def test_a_checkpoint_keeps_each_prompt_once(state: QueueState) -> None:
    assert (state.version, state.num_taken, state.given_up) == (2, 12, (3,))
    assert state.consumed == [0, 2, 4, 6]
    assert [found.group for found in state.queue] == ["7/0", "8/0"]
    assert [prompt.position for prompt in state.open] == [1, 5, 9, 10, 11]


async def test_running_groups_are_generated_again_and_finished_ones_are_not(state: QueueState) -> None:
    run = started(num_prompts=12, max_staleness=3, state=state)
    await run.train()
    assert run.consumed == [[1, 5], [7, 8], [9, 10]], "one is left, and does not fill a step"
    assert [ticket.position for ticket in run.dispatched] == [1, 5, 9, 10, 11]
    assert {ticket.version for ticket in run.dispatched} == {2}
    assert run.lags == [[0, 0], [3, 3], [2, 2]]


async def test_a_stop_before_the_checkpoint_costs_no_attempt() -> None:
    run = started()
    await run.stop()
    assert [(prompt.position, prompt.attempt) for prompt in run.state().open] == [(0, 0), (1, 0), (2, 0), (3, 0)]


async def test_what_was_finished_before_is_finished_first(state: QueueState) -> None:
    run = started(num_prompts=12, max_staleness=4, policy="ready_first", state=state)
    await run.dispatcher.update_pending(2)
    run.dispatcher.updated(2)
    await asyncio.sleep(20.0)
    await run.train()
    assert run.consumed[0] == [7, 8]


async def test_faults_of_before_count() -> None:
    state = QueueState(0, 1, (OpenPrompt(0, "prompt 0", 1, 1),), (), ())
    again = started({0: STUCK}, deadline_s=2.0, num_prompts=8, state=state)
    await again.train()
    assert [(each.position, each.attempt, each.is_given_up) for each in again.cancelled] == [(0, 1, True)]


async def test_what_is_too_old_for_a_smaller_bound_is_dropped(state: QueueState) -> None:
    run = started(num_prompts=12, max_staleness=0, state=state)
    await run.train()
    assert (run.reasons(), [each.lost_s for each in run.cancelled]) == ([(7, "stale"), (8, "stale")], [0.0, 0.0])
    assert {lag for lags in run.lags for lag in lags} == {0}


def test_other_prompts_are_refused(state: QueueState) -> None:
    with pytest.raises(CheckpointError, match="had taken 12 prompts, but this run has only 11"):
        PromptFeed(scripted_prompts(11), 11).restore(state)
    others = (ScriptedPrompt(f"line {number}") for number in range(12))
    with pytest.raises(CheckpointError, match="prompt 1 was prompt 1 in the checkpoint's run, but is line 1 in"):
        PromptFeed(others, 12).restore(state)


def test_what_a_run_with_other_settings_cannot_train_on_is_drawn_again(state: QueueState) -> None:
    assert drawn_again(state, 2, lambda group: True) == state
    other_size = drawn_again(state, 2, lambda group: group != "7/0")
    assert [found.group for found in other_size.queue] == ["8/0"]
    assert [prompt.position for prompt in other_size.open] == [1, 5, 7, 9, 10, 11]
    other_versions = drawn_again(state, 4, lambda group: True)
    assert (other_versions.version, other_versions.queue) == (4, ())
    assert other_versions.consumed == state.consumed
