# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The queue that a run goes on with under other settings: groups that lack what it replays are drawn again."""

from pathlib import Path

import numpy as np
import pytest

from nemo_rl_moe.checkpoints.state import LoopState
from nemo_rl_moe.data.prompts import Prompt
from nemo_rl_moe.distributed.stored_rows import IN_PLACE, StoredRows
from nemo_rl_moe.launch import rollouts
from nemo_rl_moe.launch.rollouts import state_at
from nemo_rl_moe.rollouts.dispatch.groups import Finished, Ticket
from nemo_rl_moe.rollouts.dispatch.prompts import QueueState
from nemo_rl_moe.rollouts.dispatch.saved_queue import write_queue
from nemo_rl_moe.rollouts.trajectory import Trajectory
from tests.support.grpo_fakes import small_config, trajectory
from tests.support.grpo_inputs import tokens_of, with_tokens
from tests.support.scripted_rollouts import loader

OF_TWO = ("grpo.num_generations_per_prompt=2", "policy.train_global_batch_size=4", "policy.train_micro_batch_size=2")
ROUTES = StoredRows.of(np.zeros((2, 2, 1), dtype=np.int16))


def group_of(*routes: StoredRows | None) -> list[Trajectory]:
    """Return a group with a trajectory for each of these rows of routes."""
    return [with_tokens(trajectory(), tokens_of((10,), (5, 1), routed_experts=rows)) for rows in routes]


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ((), [0, 1, 2]),
        (OF_TWO, [3]),
        # No checkpoint has kept tokens.
        (("loss_fn.sampling_mask=replay", "policy.generation.top_k=5"), []),
        (("policy.megatron_cfg.routing_replay=rollout",), [0]),
    ],
)
def test_a_group_without_what_is_replayed_is_drawn_again(
    settings: tuple[str, ...], kept: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollouts, "RAY_STORE", IN_PLACE)
    config = small_config("grpo.max_num_epochs=2", *settings)
    prompts: list[Prompt] = [prompt for epoch in range(2) for found in loader().epoch(epoch) for prompt in found]
    groups = (
        group_of(ROUTES, ROUTES, ROUTES),
        group_of(ROUTES, None, ROUTES),
        group_of(None, None, None),
        group_of(ROUTES, ROUTES),
    )
    queue = [Finished(Ticket(prompts[number], number, 1, 1), group, 1, 0) for number, group in enumerate(groups)]
    write_queue(tmp_path, QueueState(1, len(groups), (), (), tuple(queue)), list)
    found = state_at(config, LoopState(1, 1), tmp_path, loader())
    assert [each.ticket.position for each in found.queue] == kept
    assert [prompt.position for prompt in found.open] == [number for number in range(4) if number not in kept]


def test_without_the_count_of_updates_nobody_can_tell_how_old_tokens_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the optimizer in the checkpoint it begins at 0 again: tokens would be younger than the weights."""
    monkeypatch.setattr(rollouts, "RAY_STORE", IN_PLACE)
    config = small_config("grpo.max_num_epochs=2")
    prompts: list[Prompt] = [prompt for found in loader().epoch(0) for prompt in found]
    queue = (Finished(Ticket(prompts[0], 0, 1, 1), group_of(None, None, None), 1, 0),)
    write_queue(tmp_path, QueueState(1, 1, (), (), queue), list)
    with_count = state_at(config, LoopState(1, 1), tmp_path, loader())
    assert [each.ticket.position for each in with_count.queue] == [0]
    without = state_at(config, LoopState(1, 1), tmp_path, loader(), with_optimizer=False)
    assert (without.queue, [prompt.position for prompt in without.open]) == ((), [0])
