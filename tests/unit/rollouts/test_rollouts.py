# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Responses: how they are asked for, read and scored, and the batch that is made of them."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_moe.generation.interface import GeneratedSequence
from nemo_rl_moe.metrics import PhaseClock
from nemo_rl_moe.rollouts.training_batch import training_batch
from nemo_rl_moe.rollouts.trajectory import (
    Trajectory,
    group_correctness,
    group_rewards,
    group_sampled_tokens,
    rollout_metrics,
)
from tests.support.grpo_fakes import (
    END_TOKEN,
    PAD_TOKEN,
    SAMPLING,
    FakeEngine,
    FakeRewardFunction,
    make_runner,
    prompts,
    trajectory,
)
from tests.support.grpo_inputs import only_sequence, sampled_ids


def test_every_prompt_gets_its_responses_one_after_the_other() -> None:
    engine, reward_function = FakeEngine(), FakeRewardFunction()
    asked = prompts(2)
    runner = make_runner(engine, reward_function)
    runner.clock = clock = PhaseClock()
    rollouts = runner.evaluate(asked, 3, SAMPLING, (1, 2))
    (request,) = engine.requests
    assert request.prompts == (asked[0].token_ids,) * 3 + (asked[1].token_ids,) * 3
    assert request.sampling is SAMPLING
    assert [found.sample_id for found in rollouts] == [asked[0].sample_id] * 3 + [asked[1].sample_id] * 3
    assert len({found.group_id for found in rollouts}) == 2
    assert [item.sample_id for item in reward_function.items] == ["train:0"] * 3 + ["train:1"] * 3
    assert [item.prompt for item in reward_function.items] == ["train 0"] * 3 + ["train 1"] * 3
    assert [item.record for item in reward_function.items] == [{"answer": "0"}] * 3 + [{"answer": "1"}] * 3
    assert [item.response for item in reward_function.items] == [found.response_text for found in rollouts]
    assert [found.reward for found in rollouts] == [reward_function.reward(item) for item in reward_function.items]
    metrics = clock.metrics()
    assert metrics.keys() == {
        "timing/generation/seconds",
        "timing/generation/tokens_per_second",
        "timing/rewards/seconds",
    }
    generated = sum(found.num_sampled_tokens for found in rollouts)
    speed = metrics["timing/generation/tokens_per_second"]
    assert speed * metrics["timing/generation/seconds"] == pytest.approx(generated)


def seeds(*key: int, count: int = 4) -> tuple[int, ...]:
    engine = FakeEngine()
    make_runner(engine, FakeRewardFunction()).evaluate(prompts(count), 1, SAMPLING, key)
    return engine.requests[0].seeds


def test_seeds_depend_on_the_key_alone_and_differ_from_each_other() -> None:
    assert seeds(1, 2) == seeds(1, 2)
    assert len(set(seeds(1, 2, count=50))) == 50
    assert seeds(1, 2, count=50)[:4] == seeds(1, 2), "more prompts change nothing of the first"
    keys = [(seed, kind, step, rounds) for seed in (0, 1) for kind in (0, 1) for step in (0, 1) for rounds in (0, 1)]
    assert len({seed for key in keys for seed in seeds(*key)}) == 4 * len(keys)
    assert all(0 <= seed < 2**64 and isinstance(seed, int) for seed in seeds(7))


@pytest.mark.parametrize(
    ("token_ids", "text"),
    [([5, 6, END_TOKEN], "5 6"), ([5, END_TOKEN, 6], f"5 {END_TOKEN} 6"), ([END_TOKEN], ""), ([5, 6], "5 6"), ([], "")],
)
def test_the_end_token_is_no_part_of_the_text(token_ids: list[int], text: str) -> None:
    class FixedEngine(FakeEngine):
        def _respond(self, seed: int):  # type: ignore[no-untyped-def]
            return GeneratedSequence(np.array(token_ids, dtype=np.int64), np.zeros(len(token_ids)), False, 0)

    reward_function = FakeRewardFunction(reward=lambda _: 0.0)
    (found,) = make_runner(FixedEngine(), reward_function).evaluate(prompts(1), 1, SAMPLING, (0,))
    assert found.response_text == reward_function.items[0].response == text
    assert sampled_ids(found) == token_ids, "the tokens stay as they were sampled"


def test_whether_it_was_cut_off_reaches_the_environment() -> None:
    reward_function = FakeRewardFunction()
    worker = make_runner(FakeEngine(truncates=True), reward_function)
    rollouts = worker.evaluate(prompts(8), 1, SAMPLING, (0,))
    cut = [found.is_truncated for found in rollouts]
    assert [item.is_truncated for item in reward_function.items] == cut
    assert {True, False} == set(cut)


def test_tables_have_one_row_a_prompt() -> None:
    rollouts = [
        trajectory(reward=1.5, is_correct=True, response_ids=[5]),
        trajectory(reward=-1.0, response_ids=[5, 6]),
        trajectory(reward=0.1, response_ids=[5, 6, 7]),
        trajectory(reward=2.0, is_correct=True, response_ids=[5, 6, 7, 8]),
    ]
    assert group_rewards(rollouts, 2).tolist() == [[1.5, -1.0], [0.1, 2.0]]
    assert group_rewards(rollouts, 2).dtype == torch.float64
    assert group_correctness(rollouts, 2).tolist() == [[True, False], [False, True]]
    assert group_sampled_tokens(rollouts, 2).tolist() == [[1, 2], [3, 4]]


def test_batch_by_hand() -> None:
    rollouts = [
        trajectory([10, 11], [5, 6, 1], [-0.1, -0.2, -0.3], sample_id="a"),
        trajectory([12], [7], [-0.4], sample_id="a"),
        trajectory([13, 14, 15], [8, 9], [-0.5, -0.6], is_truncated=True, sample_id="b"),
        trajectory([16], [], [], sample_id="b"),
    ]
    advantages = torch.tensor([[1.0, -1.0], [0.5, -0.5]], dtype=torch.float64)
    batch = training_batch(rollouts, advantages, PAD_TOKEN, leave_out_truncated=False)
    assert batch.input_ids.tolist() == [
        [10, 11, 5, 6, 1],
        [12, 7, 0, 0, 0],
        [13, 14, 15, 8, 9],
        [16, 0, 0, 0, 0],
    ]
    assert batch.lengths.tolist() == [5, 2, 5, 1]
    assert batch.token_mask.int().tolist() == [
        [0, 0, 1, 1, 1],
        [0, 1, 0, 0, 0],
        [0, 0, 0, 1, 1],
        [0, 0, 0, 0, 0],
    ]
    assert batch.sample_ids == ("a", "a", "b", "b")
    assert batch.columns["advantages"].values.tolist() == [1.0, -1.0, 0.5, -0.5]
    expected = torch.tensor([[0, 0, -0.1, -0.2, -0.3], [0, -0.4, 0, 0, 0], [0, 0, 0, -0.5, -0.6], [0, 0, 0, 0, 0]])
    assert torch.equal(batch.columns["generation_logprobs"].values, expected)
    assert {column.values.dtype for column in batch.columns.values()} == {torch.float32}


def test_filtering_leaves_cut_responses_out_of_the_loss_and_changes_nothing_else() -> None:
    rollouts = [
        trajectory([10], [5, 6], is_truncated=True),
        trajectory([10], [5, 1]),
        trajectory([10, 11], [5], is_truncated=True),
        trajectory([10], [5, 6, 1]),
    ]
    advantages = torch.zeros(2, 2)
    kept = training_batch(rollouts, advantages, PAD_TOKEN, leave_out_truncated=False)
    filtered = training_batch(rollouts, advantages, PAD_TOKEN, leave_out_truncated=True)
    assert filtered.token_mask.any(dim=1).tolist() == [False, True, False, True]
    assert torch.equal(filtered.token_mask[[1, 3]], kept.token_mask[[1, 3]])
    assert torch.equal(filtered.input_ids, kept.input_ids)
    assert torch.equal(filtered.columns["generation_logprobs"].values, kept.columns["generation_logprobs"].values)
    assert (kept.num_valid_tokens(), filtered.num_valid_tokens()) == (2 + 2 + 1 + 3, 2 + 3)


@st.composite
def random_rollouts(draw: st.DrawFn) -> list[Trajectory]:
    def one() -> Trajectory:
        prompt = draw(st.lists(st.integers(2, 50), min_size=1, max_size=6))
        response = draw(st.lists(st.integers(2, 50), min_size=1, max_size=6))
        logprobs = [-(index + 1) / 8 for index in range(len(response))]
        return trajectory(prompt, response, logprobs, is_truncated=draw(st.booleans()))

    return [one() for _ in range(2 * draw(st.integers(1, 3)))]


@given(rollouts=random_rollouts(), leave_out=st.booleans())
def test_each_trained_token_stands_beside_its_own_logprob(rollouts: list[Trajectory], leave_out: bool) -> None:
    batch = training_batch(rollouts, torch.zeros(len(rollouts) // 2, 2), PAD_TOKEN, leave_out_truncated=leave_out)
    assert batch.input_ids.shape[1] == int(batch.lengths.max())
    for row, found in enumerate(rollouts):
        mask = batch.token_mask[row]
        if leave_out and found.is_truncated:
            assert not mask.any()
            continue
        assert batch.input_ids[row][mask].tolist() == sampled_ids(found)
        sequence = only_sequence(found)
        expected = sequence.logprobs[sequence.loss_mask].tolist()
        assert batch.columns["generation_logprobs"].values[row][mask].tolist() == expected
        assert not batch.columns["generation_logprobs"].values[row][~mask].any()
        assert not mask[0], "the first token has nothing before it"


def test_metrics_by_hand() -> None:
    rollouts = [
        trajectory(reward=1.0, is_correct=True, response_ids=[5, 1]),
        trajectory(reward=0.0, response_ids=[5, 6, 7, 8], is_truncated=True),
        trajectory(reward=0.5, response_ids=[5, 6, 1]),
        trajectory(reward=1.5, is_correct=True, response_ids=[1]),
    ]
    assert rollout_metrics(rollouts) == {
        "reward": 0.75,
        "reward_std": pytest.approx(np.sqrt((0.0625 + 0.5625 + 0.0625 + 0.5625) / 3)),
        "accuracy": 0.5,
        "mean_gen_tokens_per_sample": 2.5,
        "max_gen_tokens_per_sample": 4.0,
        "truncation_rate": 0.25,
    }


def test_a_single_response_has_no_spread() -> None:
    assert rollout_metrics([trajectory(reward=0.3)])["reward_std"] == 0.0
