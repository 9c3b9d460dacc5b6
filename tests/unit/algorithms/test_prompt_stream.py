# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
from nemo_rl_moe.data.prompts import PromptLoader
from nemo_rl_moe.rollouts.source import PromptStream
from tests.support.grpo_fakes import prompts


def test_gives_the_rounds_of_every_epoch_and_knows_the_last() -> None:
    loader = PromptLoader(prompts(5), 2, seed=3, shuffle=True)
    stream = PromptStream(loader, num_epochs=2)
    taken = []
    while not stream.is_used_up:
        taken.append(stream.take())
    assert taken == [*loader.epoch(0), *loader.epoch(1)]
    assert len(taken) == 4
    assert taken[:2] != taken[2:], "each epoch has an order of its own"


def test_a_stream_goes_on_where_another_stopped() -> None:
    loader = PromptLoader(prompts(7), 2, seed=5, shuffle=True)
    rounds = [*loader.epoch(0), *loader.epoch(1)]
    for taken in range(len(rounds) + 1):
        stream = PromptStream(loader, num_epochs=2, rounds_taken=taken)
        assert [stream.take() for _ in range(len(rounds) - taken)] == rounds[taken:]
        assert stream.is_used_up
        assert stream.rounds_taken == len(rounds)
