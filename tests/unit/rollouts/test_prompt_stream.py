# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Prompts of the synchronous source: the rounds of every epoch, and going on behind those that were taken."""

from nemo_rl_moe.algorithms.grpo_batch import make_source
from nemo_rl_moe.data.prompts import PromptLoader
from nemo_rl_moe.metrics import PhaseClock
from nemo_rl_moe.rollouts.source import SynchronousSource
from tests.support.grpo_fakes import SAMPLING, FakeEngine, FakeRewardFunction, make_worker, prompts, small_config


def source_of(loader: PromptLoader) -> SynchronousSource:
    config = small_config("grpo.max_num_epochs=2")
    return make_source(config, make_worker(FakeEngine(), FakeRewardFunction()), loader, SAMPLING)


def rounds_of(source: SynchronousSource) -> list[list[str]]:
    """The prompts of all steps that are left."""
    taken = []
    while not source.is_used_up:
        groups = source.next(len(taken), PhaseClock())
        taken.append(list(dict.fromkeys(found.sample_id for found in groups.trained)))
    return taken


def all_rounds(loader: PromptLoader) -> list[list[str]]:
    return [[prompt.sample_id for prompt in prompts] for epoch in (0, 1) for prompts in loader.epoch(epoch)]


def test_gives_the_rounds_of_every_epoch_and_knows_the_last() -> None:
    loader = PromptLoader(prompts(5), 2, seed=3, shuffle=True)
    taken = rounds_of(source_of(loader))
    assert taken == all_rounds(loader)
    assert len(taken) == 4
    assert taken[:2] != taken[2:], "each epoch has an order of its own"


def test_a_source_goes_on_where_another_stopped() -> None:
    loader = PromptLoader(prompts(7), 2, seed=5, shuffle=True)
    rounds = all_rounds(loader)
    first = source_of(loader)
    for taken in range(len(rounds) + 1):
        source = source_of(loader)
        source.load_state(first.state(0).batches_taken)
        assert rounds_of(source) == rounds[taken:]
        assert source.is_used_up
        assert source.state(0).batches_taken == len(rounds)
        if taken < len(rounds):
            first.next(taken, PhaseClock())
