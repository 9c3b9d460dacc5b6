# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Advantages by hand, and what must hold whatever the rewards are."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_moe.algorithms.advantages import clip_advantages, frac_zero_std_groups
from nemo_rl_moe.config.schema_grpo import AdvantageConfig
from nemo_rl_moe.rl.estimators.comparison import informative_groups
from tests.support.grpo_inputs import advantages_of_named, advantages_of_rewards

ESTIMATORS = ["grpo", "reinforce_plus_plus_baseline"]


def config_of(
    name: str = "grpo", *, leave_one_out: bool = False, normalize: bool = False, over: str = "group"
) -> AdvantageConfig:
    return AdvantageConfig.model_validate(
        {
            "name": name,
            "use_leave_one_out_baseline": leave_one_out,
            "normalize_rewards": normalize,
            "normalize_over": over,
        }
    )


def rewards_of(*groups: list[float]) -> torch.Tensor:
    return torch.tensor(groups, dtype=torch.float64)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_difference_from_the_mean_of_the_group(name: str) -> None:
    advantages = advantages_of_rewards(rewards_of([1.0, 0.0, 0.0, 1.0], [3.0, 1.0, 1.0, 1.0]), config_of(name))
    assert advantages.tolist() == [[0.5, -0.5, -0.5, 0.5], [1.5, -0.5, -0.5, -0.5]]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_leave_one_out_by_hand(name: str) -> None:
    rewards = rewards_of([6.0, 0.0, 3.0, 0.0])
    advantages = advantages_of_rewards(rewards, config_of(name, leave_one_out=True))
    # Against (0+3+0)/3, (6+3+0)/3, (6+0+0)/3 and (6+0+3)/3.
    assert advantages.tolist() == [[5.0, -3.0, 1.0, -3.0]]


def test_division_by_the_groups_own_standard_deviation() -> None:
    # Deviations 1, -1 with ddof 1: std sqrt(2); 10, -10: std 10 * sqrt(2).
    advantages = advantages_of_rewards(rewards_of([2.0, 0.0], [20.0, 0.0]), config_of(normalize=True))
    small, large = 1 / (math.sqrt(2) + 1e-6), 10 / (10 * math.sqrt(2) + 1e-6)
    assert advantages.flatten().tolist() == pytest.approx([small, -small, large, -large], rel=1e-14)


def test_division_by_the_standard_deviation_of_the_batch() -> None:
    # Rewards 2, 0, 20, 0: mean 5.5, the sum of squares 404 - 4 x 5.5^2 = 283, over 4 - 1. Differences 1, -1, 10, -10.
    scale = math.sqrt(283 / 3) + 1e-6
    rewards = rewards_of([2.0, 0.0], [20.0, 0.0])
    plain = advantages_of_rewards(rewards, config_of(normalize=True, over="batch"))
    assert plain.flatten().tolist() == pytest.approx([x / scale for x in (1, -1, 10, -10)], rel=1e-14)
    left_out = advantages_of_rewards(rewards, config_of(normalize=True, over="batch", leave_one_out=True))
    assert left_out.flatten().tolist() == pytest.approx([x / scale for x in (2, -2, 20, -20)], rel=1e-14)
    equal = advantages_of_rewards(torch.full((2, 3), 0.7), config_of(normalize=True, over="batch"))
    assert equal.tolist() == [[0.0] * 3] * 2


def test_two_rewards_by_hand_each_in_its_group_before_they_are_added() -> None:
    # Right and wrong, with and without the format: (1, 0), (0, 1), (1, 1), (0, 0). Each reward has the deviations +-0.5
    # in its group, of which the sample standard deviation is sqrt(1 / 3), so that each part is +-sqrt(3) / 2 = u.
    named = torch.stack([rewards_of([1.0, 0.0, 1.0, 0.0]), rewards_of([0.0, 1.0, 1.0, 0.0])])
    u = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    parts = [2 * u - u, -2 * u + u, 2 * u + u, -2 * u - u]
    scale = math.sqrt(sum(part**2 for part in parts) / 3) + 1e-6
    advantages = advantages_of_named(named, [2.0, 1.0], config_of("gdpo", normalize=True))
    assert advantages.flatten().tolist() == pytest.approx([part / scale for part in parts], rel=1e-14)
    # With equal weights the sum does not distinguish the first two from the mean, and neither does this.
    assert advantages_of_named(named, [1.0, 1.0], config_of("gdpo", normalize=True))[0, :2].tolist() == [0.0, 0.0]


def test_rewards_of_different_size_count_by_their_weights_alone() -> None:
    """Why they are normalised first: of a sum, the larger reward is nearly all."""
    small, large = rewards_of([1.0, 0.0, 1.0, 0.0]), rewards_of([0.0, 0.0, 100.0, 100.0])
    config = config_of("gdpo", normalize=True)
    advantages = advantages_of_named(torch.stack([small, large]), [1.0, 1.0], config)
    assert advantages[0, 0].item() == pytest.approx(advantages[0, 3].item(), abs=1e-5)
    of_sum = advantages_of_rewards(small + large, config_of(normalize=True))
    assert of_sum[0, 0] < -0.8 < 0.8 < of_sum[0, 3]


def test_decoupled_rewards_without_any_spread_teach_nothing() -> None:
    equal = torch.full((2, 3, 4), 0.7, dtype=torch.float64)
    assert advantages_of_named(equal, [1.0, 3.0], config_of("gdpo", normalize=True)).tolist() == [[0.0] * 4] * 3
    with pytest.raises(ValueError, match="at least two generations"):
        advantages_of_named(torch.ones(2, 3, 1), [1.0, 1.0], config_of("gdpo"))


def test_decoupled_rewards_leaving_one_out_and_without_scaling() -> None:
    # Without scaling, leaving one out is a common factor, which the division by the batch's deviation takes away.
    named = torch.stack([rewards_of([6.0, 0.0, 3.0], [1.0, 2.0, 3.0]), rewards_of([1.0, 1.0, 0.0], [0.0, 0.0, 4.0])])
    plain, left_out = (
        advantages_of_named(named, [1.0, 0.5], config_of("gdpo", leave_one_out=one)) for one in (False, True)
    )
    torch.testing.assert_close(plain, left_out, rtol=1e-5, atol=0.0)
    # 3 + 1 / 6, -3 + 1 / 6, 0 - 1 / 3 and -1 - 2 / 3, 0 - 2 / 3, 1 + 4 / 3.
    parts = torch.tensor([[19 / 6, -17 / 6, -1 / 3], [-5 / 3, -2 / 3, 7 / 3]], dtype=torch.float64)
    torch.testing.assert_close(plain, parts / (parts.std() + 1e-6), rtol=1e-14, atol=0.0)


def test_reinforce_is_the_reward_itself() -> None:
    rewards = rewards_of([2.0, 0.0], [0.7, 0.7])
    advantages = advantages_of_rewards(rewards, config_of("reinforce"))
    assert advantages.tolist() == rewards.tolist()
    assert advantages.data_ptr() != rewards.data_ptr()
    assert advantages_of_rewards(rewards_of([3.0]), config_of("reinforce")).tolist() == [[3.0]]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (None, None, [-3.0, -0.5, 0.0, 4.0]),
        (-1.0, None, [-1.0, -0.5, 0.0, 4.0]),
        (None, 2.0, [-3.0, -0.5, 0.0, 2.0]),
        (-1.0, 0.0, [-1.0, -0.5, 0.0, 0.0]),
    ],
)
def test_bounds_of_advantages(low: float | None, high: float | None, expected: list[float]) -> None:
    advantages = rewards_of([-3.0, -0.5], [0.0, 4.0])
    assert clip_advantages(advantages, low, high).flatten().tolist() == expected
    assert clip_advantages(rewards_of([math.nan]), low, high).isnan().all()


def test_leave_one_out_divides_by_the_standard_deviation_of_the_whole_group() -> None:
    rewards = rewards_of([1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 2.0])
    plain = advantages_of_rewards(rewards, config_of(normalize=True))
    leave_one_out = advantages_of_rewards(rewards, config_of(normalize=True, leave_one_out=True))
    torch.testing.assert_close(leave_one_out, plain * 4 / 3, rtol=1e-14, atol=0)


def test_reinforce_plus_plus_compares_with_the_whole_batch() -> None:
    # Mean 2; deviations -1, -1, 1, 1 and, in a group without any spread, 0, 0: the sum of squares is 4, over 6 - 1.
    rewards = rewards_of([1.0, 1.0], [3.0, 3.0], [2.0, 2.0])
    plain = advantages_of_rewards(rewards, config_of("reinforce_plus_plus"))
    assert plain.tolist() == [[-1.0, -1.0], [1.0, 1.0], [0.0, 0.0]]
    scale = math.sqrt(4 / 5) + 1e-6
    normalized = advantages_of_rewards(rewards, config_of("reinforce_plus_plus", normalize=True))
    torch.testing.assert_close(normalized, plain / scale, rtol=1e-14, atol=0)
    equal = advantages_of_rewards(torch.full((2, 3), 0.7), config_of("reinforce_plus_plus", normalize=True))
    assert equal.tolist() == [[0.0] * 3] * 2


def test_reinforce_plus_plus_divides_by_the_standard_deviation_of_the_batch() -> None:
    advantages = advantages_of_rewards(
        rewards_of([2.0, 0.0], [20.0, 0.0]), config_of("reinforce_plus_plus_baseline", normalize=True)
    )
    # Differences 1, -1, 10, -10: the sum of squares is 202, over 4 - 1.
    scale = math.sqrt(202 / 3) + 1e-6
    assert advantages.flatten().tolist() == pytest.approx([x / scale for x in (1, -1, 10, -10)], rel=1e-14)


def test_reinforce_plus_plus_has_mean_0_and_standard_deviation_1() -> None:
    rewards = torch.rand(16, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for leave_one_out in (False, True):
        config = config_of("reinforce_plus_plus_baseline", normalize=True, leave_one_out=leave_one_out)
        advantages = advantages_of_rewards(rewards, config)
        assert advantages.mean().item() == pytest.approx(0, abs=1e-14)
        assert advantages.std().item() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_give_exactly_0(name: str, normalize: bool, dtype: torch.dtype) -> None:
    equal_but_for_rounding = [0.1 + 0.2, 0.3, 0.3]
    assert equal_but_for_rounding[0] != equal_but_for_rounding[1]
    rewards = rewards_of(equal_but_for_rounding, [1.0, 0.0, 0.5], [0.7, 0.7, 0.7]).to(dtype)
    advantages = advantages_of_rewards(rewards, config_of(name, normalize=normalize, leave_one_out=True))
    assert advantages.dtype is dtype
    assert torch.equal(advantages[[0, 2]], torch.zeros(2, 3, dtype=dtype))
    assert advantages[1].count_nonzero() == 2
    assert torch.equal(advantages_of_rewards(rewards[[0, 2]], config_of(name, normalize=normalize)), advantages[[0, 2]])


def test_which_groups_teach_something() -> None:
    rewards = rewards_of(
        [0.0, 0.0],
        [0.0, 1.0],
        [0.1 + 0.2 - 0.3, 0.0],  # rounding, however large beside the rewards themselves
        [1.0, 1.0 + 1e-7],
        [1.0, 1.0 + 1e-5],
        [1e9, 1e9 + 1],
        [-1e3, -1e3 - 0.1],
    )
    assert informative_groups(rewards).tolist() == [False, True, False, False, True, False, True]
    assert frac_zero_std_groups(rewards) == 4 / 7


def test_a_nan_is_not_hidden() -> None:
    rewards = rewards_of([math.nan, 1.0])
    assert informative_groups(rewards).tolist() == [True]
    assert advantages_of_rewards(rewards, config_of()).isnan().all()


def test_one_generation_has_nothing_to_be_compared_with() -> None:
    with pytest.raises(ValueError, match="at least two generations"):
        advantages_of_rewards(rewards_of([1.0], [0.0]), config_of())
    with pytest.raises(ValueError, match="at least two generations"):
        advantages_of_rewards(rewards_of([1.0]), config_of("reinforce_plus_plus"))


def test_reinforce_plus_plus_takes_one_generation_a_prompt() -> None:
    rewards = [1.0, 0.0, 0.0, 1.0]
    alone = advantages_of_rewards(rewards_of(*([reward] for reward in rewards)), config_of("reinforce_plus_plus"))
    assert alone.tolist() == [[0.5], [-0.5], [-0.5], [0.5]]
    normalized = advantages_of_rewards(
        rewards_of(*([reward] for reward in rewards)), config_of("reinforce_plus_plus", normalize=True)
    )
    # The sum of squares is 1, over 4 - 1.
    assert normalized.flatten().tolist() == pytest.approx([sign * 0.5 / (3**-0.5 + 1e-6) for sign in (1, -1, -1, 1)])


@settings(deadline=None)
@given(
    rewards=st.integers(2, 6).flatmap(
        lambda n: st.lists(st.lists(st.floats(-10, 10), min_size=n, max_size=n), min_size=1, max_size=5)
    ),
    name=st.sampled_from(ESTIMATORS),
    leave_one_out=st.booleans(),
    normalize=st.booleans(),
    shift=st.floats(-5, 5),
)
def test_advantages_of_a_group_sum_to_0_and_ignore_a_constant(
    rewards: list[list[float]], name: str, leave_one_out: bool, normalize: bool, shift: float
) -> None:
    config = config_of(name, leave_one_out=leave_one_out, normalize=normalize)
    tensor = rewards_of(*rewards)
    advantages = advantages_of_rewards(tensor, config)
    assert advantages.sum(dim=1).abs().max() < 1e-8
    # Groups on the edge of the tolerance may cross it when they are moved.
    if torch.equal(informative_groups(tensor), informative_groups(tensor + shift)):
        torch.testing.assert_close(advantages_of_rewards(tensor + shift, config), advantages, rtol=1e-6, atol=1e-6)
