# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Prompts of a source: the rounds of every epoch, and going on behind those that were taken."""

from nemo_rl_moe.checkpoints.state import LoopState
from nemo_rl_moe.data.prompts import PromptLoader
from nemo_rl_moe.rollouts.dispatch.source import SampledGroups
from tests.support.grpo_fakes import (
    FakeEngine,
    FakeRewardFunction,
    groups_of_step,
    make_runner,
    make_source,
    prompts,
    small_config,
)


def source_of(loader: PromptLoader, steps_done: int = 0) -> SampledGroups:
    runner = make_runner(FakeEngine(), FakeRewardFunction())
    done = LoopState(step=steps_done, batches_taken=steps_done)
    return make_source(small_config("grpo.max_num_epochs=2"), runner, loader, done)


def rounds_of(source: SampledGroups, steps_done: int = 0) -> list[list[str]]:
    """The prompts of all steps that are left."""
    taken: list[list[str]] = []
    while not source.is_used_up:
        groups = groups_of_step(source, steps_done + len(taken))
        taken.append(list(dict.fromkeys(found.sample_id for found in groups.trained)))
    return taken


def all_rounds(loader: PromptLoader) -> list[list[str]]:
    return [[prompt.sample_id for prompt in prompts] for epoch in (0, 1) for prompts in loader.epoch(epoch)]


def test_a_source_goes_on_where_another_stopped() -> None:
    loader = PromptLoader(prompts(7), 2, seed=5, shuffle=True)
    rounds = all_rounds(loader)
    first = source_of(loader)
    for taken in range(len(rounds) + 1):
        assert first.state(taken).batches_taken == taken
        source = source_of(loader, taken)
        assert rounds_of(source, taken) == rounds[taken:]
        assert source.is_used_up
        assert source.state(len(rounds)).batches_taken == len(rounds)
        if taken < len(rounds):
            groups_of_step(first, taken)
