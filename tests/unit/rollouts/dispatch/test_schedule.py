# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Recorded schedules: files of them, and runs that repeat them, however long groups take this time."""

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_moe.errors import DataError, UserError
from nemo_rl_moe.launch import grpo
from nemo_rl_moe.launch.grpo import run_grpo
from nemo_rl_moe.launch.rollouts import plan_rollouts
from nemo_rl_moe.rollouts.dispatch.admission import Bounds
from nemo_rl_moe.rollouts.dispatch.prompts import QueueState
from nemo_rl_moe.rollouts.dispatch.schedule import (
    ReplayedFeed,
    ScheduledGroup,
    ScheduledStep,
    line_of,
    needed_of,
    read_schedule,
    replay_policy,
)
from tests.support.clocks_and_disks import run_virtually
from tests.support.grpo_fakes import small_config
from tests.support.quick_list import examples
from tests.support.scripted_rollouts import Fate, ScriptedRun, loader, scripted_prompts
from tests.unit.rollouts.dispatch.test_field_bugs_of_ends import started

DAMAGED = "{path}:1: not a step of a schedule; expected schedule.jsonl of an asynchronous run"
SECONDS = st.lists(st.sampled_from([0.5, 1.0, 2.5, 5.0]), min_size=12, max_size=12)


def recorded(seconds: list[float], **options: object) -> ScriptedRun:
    """Train on groups that overtake each other."""

    async def body() -> ScriptedRun:
        options_with_defaults = {"policy": "ready_first", "max_staleness": 2, "num_prompts": 12, **options}
        run = started(lambda ticket: seconds[ticket.position] + ticket.attempt, **options_with_defaults)
        await run.train(4)
        return run

    return run_virtually(body())


def repeated(schedule: list[ScheduledStep], fates: dict[int, Fate], concurrency: int | None = None) -> ScriptedRun:
    async def body() -> ScriptedRun:
        bounds = ScriptedRun(concurrency=concurrency).bounds
        run = started(
            fates,
            concurrency=concurrency,
            policy=replay_policy(schedule, bounds),
            feed=ReplayedFeed(schedule, scripted_prompts(12)),
        )
        await run.train()
        run.check_each_group_ended_once()
        return run

    return run_virtually(body())


@settings(deadline=None, max_examples=examples(30))
@given(SECONDS, SECONDS, st.sampled_from(["drop", "wait"]), st.none() | st.integers(1, 3))
def test_a_repeated_run_trains_on_the_same_groups_with_the_same_weights(
    seconds: list[float], others: list[float], on_stale: str, concurrency: int | None
) -> None:
    first = recorded(seconds, on_stale=on_stale)
    schedule = [ScheduledStep.of(batch) for batch in first.batches]
    again = repeated(schedule, dict(enumerate(others)), concurrency)
    assert again.consumed == first.consumed
    assert again.lags == first.lags
    assert [[found.group for found in batch.groups] for batch in again.batches] == [
        [found.group for found in batch.groups] for batch in first.batches
    ]
    assert all(each.in_flight == 0 for batch in again.batches for each in batch.staleness)


def test_a_repeated_run_goes_on_from_a_checkpoint() -> None:
    first = recorded([1.0, 4.0, 0.5, 2.5] * 3)
    schedule = [ScheduledStep.of(batch) for batch in first.batches]

    async def body() -> list[list[int]]:
        bounds = ScriptedRun().bounds
        policy, state, consumed = replay_policy(schedule, bounds), None, list[list[int]]()
        for num_steps in (1, 2, 1):
            run = started(policy=policy, feed=ReplayedFeed(schedule, scripted_prompts(12)), state=state)
            assert await run.train(num_steps) == num_steps
            state, consumed = run.state(), consumed + run.consumed
            await run.stop()
        assert run.dispatcher.is_used_up
        return consumed

    assert run_virtually(body()) == first.consumed


def test_a_file_keeps_a_schedule(tmp_path: Path) -> None:
    steps = [ScheduledStep.of(batch) for batch in recorded([1.0, 3.0] * 6).batches]
    path = tmp_path / "schedule.jsonl"
    # The run went on from a checkpoint after step 2.
    path.write_text("".join(f"{line_of(step, step.version + 1)}\n" for step in [*steps, *steps[2:]]))
    assert len(path.read_text().splitlines()) == 6
    assert read_schedule(path) == steps


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "schedule.jsonl"
    path.write_text(f"{line_of(ScheduledStep(0, ()), 1)}\n", encoding="utf-8-sig")
    assert read_schedule(path) == [ScheduledStep(0, ())]


@pytest.mark.parametrize("line", ["{", "{}", '{"version": 0, "groups": [{"position": 1}]}', "[]"])
def test_a_damaged_file_is_named_with_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "schedule.jsonl"
    path.write_text(f"{line_of(ScheduledStep(0, ()), 1)}\n{line}\n")
    with pytest.raises(DataError, match=r"schedule.jsonl:2: not a step of a schedule; expected schedule.jsonl of an"):
        read_schedule(path)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "{path} cannot be read: No such file or directory"),
        (b"", "{path}: has no steps"),
        (b"\xff\n", DAMAGED),
        (
            b'{"version": true, "groups": []}',
            DAMAGED,
        ),
        (b'{"version": 0, "groups": []}\n', "the schedule has a step with more or fewer than this run's 2 groups"),
    ],
)
def test_a_schedule_that_cannot_be_repeated_is_reported_with_its_key(
    tmp_path: Path, content: bytes | None, problem: str
) -> None:
    path = tmp_path / "schedule.jsonl"
    if content is not None:
        path.write_bytes(content)
    chosen = ("grpo.rollouts.mode=asynchronous", f"grpo.rollouts.replay_schedule={path}")
    with pytest.raises(DataError) as error:
        plan_rollouts(small_config(*chosen, "policy.generation.backend=vllm"))
    assert str(error.value) == f"grpo.rollouts.replay_schedule: {problem.format(path=path)}"


def test_a_schedule_is_read_before_models_and_data(tmp_path: Path) -> None:
    chosen = ("grpo.rollouts.mode=asynchronous", f"grpo.rollouts.replay_schedule={tmp_path / 'schedule.jsonl'}")
    untouched: Any = None
    with pytest.raises(DataError, match=r"^grpo.rollouts.replay_schedule: .* cannot be read"):
        run_grpo(small_config(*chosen), untouched)


@pytest.mark.parametrize(
    ("version", "name", "problem"),
    [
        (0, "other:1", "the schedule's prompt 0 is other:1; in this run's data it is train:"),
        (3, "train:1", "the schedule begins at version 3, and this run at 0"),
    ],
)
def test_a_schedule_of_another_run_is_reported_before_workers_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int, name: str, problem: str
) -> None:
    path, prompts = tmp_path / "schedule.jsonl", loader()
    names = [prompt.sample_id for prompt in next(iter(prompts.epoch(0)))]
    groups = [ScheduledGroup(at, each, 0, version, version) for at, each in enumerate(names)]
    if name.startswith("other"):
        groups[0] = replace(groups[0], sample_id=name)
    path.write_text(line_of(ScheduledStep(version, tuple(groups)), version + 1))
    prepared = SimpleNamespace(
        loader=lambda config: prompts, fingerprints=lambda config: {}, training={"": list(prompts.epoch(0))}
    )
    monkeypatch.setattr(grpo, "prepare_rollouts", lambda config, run: prepared)
    run: Any = SimpleNamespace(begin=lambda *about: None, is_complete=False, remaining_steps=range(5))
    chosen = ("grpo.rollouts.mode=asynchronous", f"grpo.rollouts.replay_schedule={path}")
    with pytest.raises(DataError) as error:
        run_grpo(small_config(*chosen), run)
    assert str(error.value).startswith(f"grpo.rollouts.replay_schedule: {problem}")


def test_other_prompts_are_refused() -> None:
    schedule = [ScheduledStep.of(batch) for batch in recorded([1.0] * 12).batches]
    with pytest.raises(DataError, match="prompt 2 is prompt 2; in this run's data it is missing"):
        ReplayedFeed(schedule, scripted_prompts(2))


def test_a_schedule_of_other_steps_is_refused() -> None:
    schedule = [ScheduledStep.of(batch) for batch in recorded([1.0] * 12).batches]
    with pytest.raises(DataError, match="another size than the 3 groups"):
        replay_policy(schedule, Bounds(groups_per_step=3))
    with pytest.raises(DataError, match="trains version 2 after 0, expected 1: steps are missing, or have another"):
        replay_policy([schedule[0], *schedule[2:]], Bounds(groups_per_step=2))
    with pytest.raises(DataError, match="trains version 1 after 0, expected 2"):
        replay_policy(schedule, Bounds(groups_per_step=2, updates_per_step=2))


@pytest.mark.parametrize(
    ("groups", "problem"),
    [
        ([(0, 0), (2, 1)], "prompt 0 is trained on twice, in the step that trains version 1"),
        ([(2, 0), (3, 2)], "prompt 3 is dispatched at version 2, in the step that trains version 1"),
    ],
)
def test_a_schedule_that_no_run_has_recorded_is_refused(groups: list[tuple[int, int]], problem: str) -> None:
    steps = [
        ScheduledStep(version, tuple(ScheduledGroup(at, f"prompt {at}", 0, began, began) for at, began in of_step))
        for version, of_step in enumerate([[(0, 0), (1, 0)], groups])
    ]
    with pytest.raises(DataError, match=problem):
        replay_policy(steps, Bounds(groups_per_step=2))


def test_a_version_with_too_many_digits_is_a_schedule_that_begins_later() -> None:
    groups = tuple(ScheduledGroup(at, f"prompt {at}", 0, 0, 0) for at in range(2))
    schedule = [ScheduledStep(10**30, groups)]
    replay_policy(schedule, Bounds(groups_per_step=2))
    feed = ReplayedFeed(schedule, scripted_prompts(12))
    with pytest.raises(DataError, match=f"the schedule begins at version {10**30}, and this run at 0"):
        feed.restore(QueueState(0, 0, (), (), ()))


def test_a_schedule_that_begins_later_is_that_of_a_run_which_went_on() -> None:
    schedule = [ScheduledStep.of(batch) for batch in recorded([1.0, 4.0, 0.5, 2.5] * 3).batches]
    feed = ReplayedFeed(schedule[2:], scripted_prompts(12))
    for version in (2, 3, 4):
        feed.restore(QueueState(version, 0, (), (), ()))
        assert feed.num_left == 2 * (4 - version)
    with pytest.raises(DataError, match="the schedule begins at version 2, and this run at 0"):
        feed.restore(QueueState(0, 0, (), (), ()))


def test_of_a_queue_that_comes_back_a_schedule_takes_what_it_needs() -> None:
    """The queue of the recorded run is longer than its schedule: it was interrupted with groups ahead."""

    async def ahead() -> ScriptedRun:
        run = started(max_staleness=2, num_prompts=12)
        await run.train(2)
        await asyncio.sleep(9.0)
        return run

    async def goes_on(schedule: list[ScheduledStep], state: QueueState) -> ScriptedRun:
        policy, feed = replay_policy(schedule, Bounds(groups_per_step=2)), ReplayedFeed(schedule, scripted_prompts(12))
        run = started(policy=policy, feed=feed, state=needed_of(schedule, state))
        await run.train()
        return run

    run = run_virtually(ahead())
    schedule, state = [ScheduledStep.of(batch) for batch in run.batches], run.state()
    assert len(state.queue) == 6
    again = run_virtually(goes_on(schedule, state))
    assert (again.consumed, again.dispatcher.is_used_up) == ([], True)


def test_a_group_that_fails_once_is_repeated_and_then_the_run_ends() -> None:
    schedule = [ScheduledStep.of(batch) for batch in recorded([1.0] * 12).batches]
    with pytest.raises(UserError, match=r"the group of its prompt 1 .* fails again"):
        repeated(schedule, {1: OSError("lost")})


def test_a_schedule_without_an_end_is_not_read() -> None:
    with pytest.raises(DataError, match="/dev/zero: is no plain file"):
        read_schedule(Path("/dev/zero"))
