# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Credit by turn: hand-worked advantages, what every group must satisfy, and the tokens that get them."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nemo_rl_moe.algorithms.grpo_batch import advantages_of_groups, informative_groups, make_batch
from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.rewards.interface import Fault
from nemo_rl_moe.rollouts.source import RolloutGroups
from nemo_rl_moe.rollouts.training_batch import turns_of_tokens
from nemo_rl_moe.rollouts.trajectory import NOT_SAMPLED, TokenSequence, Trajectory
from tests.support.grpo_fakes import PAD_TOKEN, small_config, trajectory
from tests.support.grpo_inputs import tokens_of, with_tokens
from tests.support.quick_list import examples

Turns = Sequence[float]
"""Rewards of the turns of a response."""


@cache
def config_of(*overrides: str, size: int = 3) -> GRPOMasterConfig:
    return small_config(
        "grpo.adv_estimator.name=turn_grpo",
        "grpo.adv_estimator.normalize_rewards=false",
        f"grpo.num_generations_per_prompt={size}",
        f"policy.train_global_batch_size={2 * size}",
        "policy.train_micro_batch_size=1",
        *overrides,
    )


def response(turns: Turns, final: float, tokens_per_turn: int = 2) -> Trajectory:
    """Return a response of some turns, with two given tokens before each, whose score beside theirs is `final`."""
    parts = [tokens_of([9, 9], [5] * tokens_per_turn) for _ in turns]
    whole = TokenSequence(
        *(
            np.concatenate([vars(part)[name] for part in parts])
            for name in ("token_ids", "loss_mask", "logprobs", "weight_versions")
        )
    )
    return replace(
        with_tokens(trajectory(reward=final + sum(turns)), whole),
        num_turns=len(turns),
        turn_lengths=(tokens_per_turn,) * len(turns),
        turn_rewards=tuple(turns),
    )


def groups_of(found: Sequence[Trajectory], size: int | None = None) -> RolloutGroups:
    return RolloutGroups(list(found), list(found), size or len(found), num_filled=0)


def by_turn(config: GRPOMasterConfig, found: Sequence[Trajectory]) -> list[list[float]]:
    """Return the advantage of each turn of each response of a group, which all of its sampled tokens have."""
    of_tokens = advantages_of_groups(config, groups_of(found))[0]
    turns = turns_of_tokens(found)
    rows = []
    for advantages, numbers, each in zip(of_tokens, turns, found, strict=True):
        own = [advantages[numbers == turn].unique() for turn in range(max(len(each.turn_lengths), 1))]
        assert all(len(values) == 1 for values in own), "one advantage a turn"
        assert not advantages[numbers < 0].any(), "none beside the sampled tokens"
        rows.append([float(values) for values in own])
    return rows


def test_a_turn_gets_what_comes_from_it_on_and_not_what_was_earned_before() -> None:
    # Returns: 3 and 2; 2 and 2; 1. Means: 2 of the first turns, 2 of the second ones.
    found = [response([1.0, 0.0], 2.0), response([0.0, 0.0], 2.0), response([1.0], 0.0)]
    assert by_turn(config_of(), found) == [[1.0, 0.0], [0.0, 0.0], [-1.0]]
    by_trajectory = config_of("grpo.adv_estimator.name=grpo")
    assert advantages_of_groups(by_trajectory, groups_of(found)).tolist() == [[1.0, 0.0, -1.0]]


def test_is_normalised_at_each_turn() -> None:
    # Returns: 4 and 4; 2 and 0; 0 and -1. Means 2 and 1; deviations 2 and sqrt((9 + 1 + 4) / 2) = sqrt(7).
    found = [response([0.0, 1.0], 3.0), response([2.0, 0.0], 0.0), response([1.0, 0.0], -1.0)]
    (first, second, third) = by_turn(config_of("grpo.adv_estimator.normalize_rewards=true"), found)
    for advantages, expected in (
        (first, [2 / 2, 3 / 7**0.5]),
        (second, [0.0, -1 / 7**0.5]),
        (third, [-2 / 2, -2 / 7**0.5]),
    ):
        assert advantages == pytest.approx(expected, rel=1e-5, abs=1e-12)


def test_a_turn_that_no_other_response_has_is_compared_by_the_turn_before() -> None:
    found = [response([0.0, 0.0, 0.0], 1.0), response([0.0, 0.0], 0.0), response([0.0], 0.5)]
    # Means: 0.5 of three, 0.5 of two; the third turn is alone.
    assert by_turn(config_of(), found) == [[0.5, 0.5, 0.5], [-0.5, -0.5], [0.0]]


def test_leaving_one_out_takes_the_others_that_have_the_turn() -> None:
    found = [response([1.0, 0.0], 2.0), response([0.0, 0.0], 1.0), response([0.0], 1.0)]
    # Returns 3, 1, 1 of first turns: 3 - 1 = 2, 1 - 2 = -1; 2 and 1 of second ones: 1 and -1.
    chosen = config_of("grpo.adv_estimator.use_leave_one_out_baseline=true")
    assert by_turn(chosen, found) == [[2.0, 1.0], [-1.0, -1.0], [-1.0]]


def test_failed_responses_have_no_part() -> None:
    failed = replace(response([5.0, 5.0], 5.0), fault=Fault.ERROR, reward=0.0, turn_rewards=())
    found = [response([1.0, 0.0], 2.0), response([0.0, 0.0], 1.0), failed]
    assert by_turn(config_of(), found) == [[1.0, 0.5], [-1.0, -0.5], [0.0, 0.0]]
    lowest = by_turn(config_of("env.on_failure=lowest"), found)
    # It gets 1, the lowest reward of its group, from all of its turns on: means 5/3 and 4/3.
    assert lowest[0] == pytest.approx([3 - 5 / 3, 2 - 4 / 3])
    assert lowest[2] == pytest.approx([1 - 5 / 3, 1 - 4 / 3])
    nothing = replace(failed, turn_lengths=(), sequences=(tokens_of([9, 9]),), num_turns=0)
    advantages = advantages_of_groups(config_of("env.on_failure=zero"), groups_of([*found[:2], nothing]))
    assert not advantages[0, 2].any()
    assert advantages[0, 0].max() == pytest.approx(3 - 4 / 3), "its 0 counts in the mean of the first turns"


@st.composite
def a_group(draw: st.DrawFn, min_turns: int = 1, max_turns: int = 4) -> list[tuple[list[float], float]]:
    numbers = st.integers(-4, 4).map(float)
    turns = st.lists(numbers, min_size=min_turns, max_size=max_turns)
    return draw(st.lists(st.tuples(turns, numbers), min_size=3, max_size=3))


@given(a_group(max_turns=1), st.booleans(), st.booleans())
@settings(deadline=None, max_examples=examples(40))
def test_one_turn_is_grpo(group: list[tuple[list[float], float]], divides: bool, leaves_out: bool) -> None:
    found = [response(*each) for each in group]
    chosen = (
        f"grpo.adv_estimator.normalize_rewards={str(divides).lower()}",
        f"grpo.adv_estimator.use_leave_one_out_baseline={str(leaves_out).lower()}",
    )
    expected = advantages_of_groups(config_of(*chosen, "grpo.adv_estimator.name=grpo"), groups_of(found))
    turns = by_turn(config_of(*chosen), found)
    assert turns == [[each] for each in expected[0].tolist()]


@given(a_group())
@settings(deadline=None, max_examples=examples(60))
def test_advantages_of_each_turn_add_up_to_nothing(group: list[tuple[list[float], float]]) -> None:
    turns = by_turn(config_of(), [response(*each) for each in group])
    for place in range(4):
        own = [row[place] for row in turns if len(row) > place]
        if len(own) > 1:
            assert sum(own) == pytest.approx(0.0, abs=1e-9)


@given(a_group(min_turns=2), st.integers(0, 4), st.integers(1, 3))
@settings(deadline=None, max_examples=examples(60))
def test_what_a_turn_earns_changes_no_later_turn(group: list[tuple[list[float], float]], who: int, amount: int) -> None:
    config = config_of()
    before = by_turn(config, [response(*each) for each in group])
    changed = [([*turns], final) for turns, final in group]
    changed[who % len(group)][0][0] += amount
    after = by_turn(config, [response(*each) for each in changed])
    for row_before, row_after in zip(before, after, strict=True):
        assert row_after[1] == pytest.approx(row_before[1], abs=1e-9)


def test_a_group_with_equal_rewards_may_teach_by_its_turns() -> None:
    """A planted slip: by the sum alone, dynamic sampling would replace it."""
    found = [response([1.0, 0.0], 0.0), response([0.0, 1.0], 0.0)]
    equal = [response([1.0, 0.0], 0.0), response([1.0, 0.0], 0.0)]
    assert informative_groups(config_of(size=2), found).tolist() == [True]
    assert informative_groups(config_of(size=2), equal).tolist() == [False]
    assert informative_groups(config_of("grpo.adv_estimator.name=grpo", size=2), found).tolist() == [False]


class TestTokens:
    def several(self) -> Trajectory:
        """Two turns in a first sequence, one in a second, which repeats the first turn as given."""
        first = TokenSequence(
            token_ids=np.array([9, 5, 6, 9, 7]),
            loss_mask=np.array([False, True, True, False, True]),
            logprobs=np.zeros(5, dtype=np.float32),
            weight_versions=np.array([NOT_SAMPLED, 0, 0, NOT_SAMPLED, 0]),
        )
        second = tokens_of([9, 5, 6, 9], [8, 8])
        made = with_tokens(trajectory(reward=4.0), first, second)
        return replace(made, num_turns=3, turn_lengths=(2, 1, 2), turn_rewards=(0.0, 1.0, 0.0))

    def test_of_several_sequences_belong_to_the_turn_in_which_they_were_sampled(self) -> None:
        expected = [-1, 0, 0, -1, 1, -1, -1, -1, -1, 2, 2]
        shorter = trajectory((10,), (5, 1))  # nothing is known of its turns
        assert turns_of_tokens([self.several(), shorter]).tolist() == [expected, [-1, 0, 0, *[-1] * 8]]

    def test_get_the_advantages_of_their_turns_in_the_rows_of_the_batch(self) -> None:
        other = response([0.0, 0.0, 0.0], 0.0, tokens_per_turn=1)
        config = config_of(size=2)
        batch = make_batch(config, groups_of([self.several(), other]), PAD_TOKEN, weight_version=0)
        # Returns 4, 4, 3 against 0, 0, 0.
        values = batch.columns["advantages"].values
        assert values[0].tolist()[:5] == [0.0, 2.0, 2.0, 0.0, 2.0]
        assert values[1].tolist()[:6] == [0.0, 0.0, 0.0, 0.0, 1.5, 1.5]
        assert values[2].tolist() == [0, 0, -2.0, 0, 0, -2.0, 0, 0, -1.5]
        assert_masked_rows_have_no_advantage(batch.token_mask, values)

    def test_of_a_truncated_response_are_compared_and_left_out_of_the_loss(self) -> None:
        cut = replace(response([1.0, 0.0], 0.0), finish_reason="length")
        found = [cut, response([0.0, 0.0], 0.0)]
        config = config_of("grpo.overlong_filtering=true", size=2)
        batch = make_batch(config, groups_of(found), PAD_TOKEN, weight_version=0)
        assert not batch.token_mask[0].any()
        assert batch.columns["advantages"].values[1][2:4].tolist() == [-0.5, -0.5]


def assert_masked_rows_have_no_advantage(mask: Tensor, values: Tensor) -> None:
    assert not values[~mask].any()
    assert torch.isfinite(values).all()
