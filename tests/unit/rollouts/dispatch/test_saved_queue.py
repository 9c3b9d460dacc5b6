# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The queue in a checkpoint's folder: every field of a trajectory comes back, and damage is found."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_rl_moe.checksums import write_inventory
from nemo_rl_moe.data.prompts import Prompt
from nemo_rl_moe.distributed.batch import ModelInput
from nemo_rl_moe.distributed.stored_rows import IN_PLACE, StoredRows, fetch_rows
from nemo_rl_moe.errors import CheckpointError, DamagedCheckpointError
from nemo_rl_moe.rewards.interface import Fault
from nemo_rl_moe.rollouts.dispatch.groups import Finished, Ticket
from nemo_rl_moe.rollouts.dispatch.prompts import OpenPrompt, QueueState
from nemo_rl_moe.rollouts.dispatch.saved_queue import FOLDER, JSON_FILE, TENSOR_FILE, read_queue, write_queue
from nemo_rl_moe.rollouts.trajectory import TokenSequence, Trajectory, sequences_of
from nemo_rl_moe.runs.folder.conversations import ConversationTurn, RolloutTimes, ToolUse, as_arguments
from tests.support.grpo_fakes import prompts, trajectory
from tests.support.grpo_inputs import assert_same_trajectories, tokens_of, with_tokens

State = QueueState

TURN = ConversationTurn("assistant", "a", 0, (1, 3), is_sampled=True, calls=(ToolUse("1", "add", "{}", "died"),))
TIMES = RolloutTimes(2.0, ((0.0, 1.0),), ((1.0, 1.5),))


def some_trajectory(number: int, routes: StoredRows | None = None) -> Trajectory:
    """Return one of which every field has a value of its own."""
    made = tokens_of(range(10, 11 + number), (5, 6, 1), (-0.25, -1e-30, -3.0 / 7), routed_experts=routes)
    made = replace(made, weight_versions=np.where(made.loss_mask, np.arange(len(made)), -1))
    return replace(
        trajectory(reward=1 / 3, is_truncated=True),
        sequences=(made,),
        sample_id=f"train:{number}",
        group_id=f"train:{number}#0",
        is_correct=True,
        num_turns=2,
        prompt_text="1 + 1\n",
        response_text="\u00e9",
        fault=Fault.TIMEOUT,
        fault_message="late",
        overlong="too long",
        rewards={"accuracy": 0.1},
        metrics={"env/num": 2.5},
        conversation=(TURN, replace(TURN, role="tool", sequence=None, calls=(), text="\u00e9\n")),
        times=TIMES,
        environment="math",
        turn_lengths=(2, 1),
        turn_order=(1, 0),
        turn_rewards=(0.0, 1 / 7),
    )


def rows(count: int, value: int) -> StoredRows:
    return StoredRows.of(np.full((count, 2, 1), value, dtype=np.int16))


def some_state(further: TokenSequence | None = None) -> State:
    """A queue of two finished groups; `further` is a second sequence of the first trajectory."""
    first, second, third = prompts(3)
    ticket = Ticket(second, 1, 3, 2, attempt=1, num_faults=1, lost_s=0.5)
    routes = rows(2, 7).followed_by(rows(4, 8))
    begun = some_trajectory(1, routes)
    begun = begun if further is None else with_tokens(begun, *begun.sequences, further)
    group = [begun, some_trajectory(2, rows(5, 9))]
    without_routes = Finished(Ticket(third, 2, 3, 3), [some_trajectory(3)], 4, 0)
    opened = OpenPrompt(0, first.sample_id, 2, 1)
    return QueueState(5, 3, (opened,), (), (Finished(ticket, group, 4, 1), without_routes))


def read_back(folder: Path) -> State:
    found = read_queue(folder, iter(prompts(5)), IN_PLACE)
    assert found is not None
    return found


def test_half_a_surrogate_pair_is_written_as_its_escape(tmp_path: Path) -> None:
    """As a model writes it into a call, or an error quotes it: a file in UTF-8 does not take it."""
    half = "smile \ud83d"
    call = ToolUse(half, half, as_arguments({"query": half}), "wrong")
    turn = ConversationTurn("tool", half, 0, (0, 1), calls=(call,), name=half, call_id=half)
    first, *others = some_state().queue
    group = [replace(each, conversation=(turn,)) for each in first.group]
    write_queue(tmp_path, replace(some_state(), queue=(replace(first, group=group), *others)), list)
    (read,) = read_back(tmp_path).queue[0].group[0].conversation
    shown = "smile \\ud83d"
    assert (read.text, read.name, read.call_id) == (shown, shown, shown)
    assert (read.calls[0].name, json.loads(read.calls[0].arguments)) == (shown, {"query": half})


def test_everything_comes_back(tmp_path: Path) -> None:
    state = some_state()
    write_queue(tmp_path, state, list)
    found = read_back(tmp_path)
    assert (found.version, found.num_taken, found.open, found.given_up) == (5, 3, state.open, ())
    assert [each.ticket for each in found.queue] == [each.ticket for each in state.queue]
    assert [(each.version, each.number) for each in found.queue] == [(4, 1), (4, 0)]
    for ours, theirs in zip(found.queue, state.queue, strict=True):
        assert_same_trajectories(ours.group, theirs.group)
        assert all(each.times == TIMES for each in ours.group)
        assert all(each.logprobs.dtype == np.float32 for each in sequences_of(ours.group))
    routes = [each.routed_experts for each in sequences_of(found.queue[0].group)]
    assert fetch_rows(routes, 6, -1, list, (2, 1), "int16")[:, :, 0, 0].tolist() == [
        [7, 7, 8, 8, -1, -1],
        [9, 9, 9, 9, 9, -1],
    ]
    assert sequences_of(found.queue[1].group)[0].routed_experts is None


def test_sequences_of_a_trajectory_come_back_in_their_order(tmp_path: Path) -> None:
    further = tokens_of((10, 11, 5, 6, 1, 9), (7,), routed_experts=rows(6, 4))
    state = some_state(further)
    write_queue(tmp_path, state, list)
    found = read_back(tmp_path)
    for ours, theirs in zip(found.queue, state.queue, strict=True):
        assert_same_trajectories(ours.group, theirs.group)
    routes = [each.routed_experts for each in sequences_of(found.queue[0].group)]
    assert fetch_rows(routes, 6, -1, list, (2, 1), "int16")[:, 0, 0, 0].tolist() == [7, 4, 9]


def test_a_queue_of_the_format_before_is_read(tmp_path: Path) -> None:
    """Each trajectory was one sequence, whose sizes stood beside its other fields."""
    state = some_state()
    write_queue(tmp_path, state, list)
    path = tmp_path / FOLDER / JSON_FILE
    queue = json.loads(path.read_text())
    assert queue["format_version"] == 2
    queue["format_version"] = 1
    for group in queue["groups"]:
        for each in group["trajectories"]:
            (only,) = each.pop("sequences")
            each |= only
    path.write_text(json.dumps(queue))
    write_inventory(tmp_path / FOLDER)
    for ours, theirs in zip(read_back(tmp_path).queue, state.queue, strict=True):
        assert_same_trajectories(ours.group, theirs.group)


def test_numbers_of_environments_come_back(tmp_path: Path) -> None:
    """An environment's own numbers are of any kind: one that it could not measure is NaN, and a truth is numpy's."""
    state = some_state()
    (found,) = state.queue[1].group
    metrics: Any = {"env/nan": float("nan"), "env/inf": float("inf"), "env/used": True, "env/num": np.float32(0.5)}
    truth: Any = np.bool_(True)
    group = [replace(found, metrics=metrics, is_correct=truth)]
    write_queue(tmp_path, replace(state, queue=(replace(state.queue[1], group=group),)), list)
    (restored,) = read_back(tmp_path).queue[0].group
    np.testing.assert_equal(restored.metrics, {"env/nan": np.nan, "env/inf": np.inf, "env/used": 1.0, "env/num": 0.5})
    assert restored.is_correct is True


def test_a_checkpoint_without_a_queue(tmp_path: Path) -> None:
    assert read_queue(tmp_path, iter(prompts(5)), IN_PLACE) is None
    write_queue(tmp_path, QueueState(0, 0, (), (), ()), list)
    assert read_queue(tmp_path, iter(prompts(5)), IN_PLACE) == QueueState(0, 0, (), (), ())


@pytest.mark.parametrize("reason", ["images", "lost"])
def test_a_group_that_cannot_be_written_is_drawn_again(reason: str, tmp_path: Path) -> None:
    state = some_state()
    image: dict[str, ModelInput] = {"pixels": Any}  # type: ignore[dict-item]
    first, second = state.queue
    if reason == "images":
        shown = replace(first.group[0].sequences[0], model_inputs=image)
        first = replace(first, group=[with_tokens(first.group[0], shown), first.group[1]])
        write_queue(tmp_path, replace(state, queue=(first, second)), list)
    else:
        write_queue(tmp_path, state, lambda sources: [None for _ in sources])
    found = read_back(tmp_path)
    assert [(prompt.position, prompt.attempt) for prompt in found.open] == [(0, 2), (1, 1)]
    assert [each.ticket.position for each in found.queue] == [2]


def test_damage_and_other_prompts_are_refused(tmp_path: Path) -> None:
    write_queue(tmp_path, some_state(), list)

    def others() -> Iterator[Prompt]:
        return iter(prompts(5, "other"))

    with pytest.raises(CheckpointError, match="prompt 1 was train:1 in the checkpoint's run, but is other:1 in"):
        read_queue(tmp_path, others(), IN_PLACE)
    path = tmp_path / FOLDER / TENSOR_FILE
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match=TENSOR_FILE):
        read_queue(tmp_path, iter(prompts(5)), IN_PLACE)
