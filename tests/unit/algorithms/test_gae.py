# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Generalized advantages: numbers worked by hand, the definition as sums in float64, tokens that are not trained."""

import math

import pytest
import torch
from torch import Tensor

from nemo_rl_moe.rl.gae import explained_variance, generalized_advantages, token_rewards, whitened


def row(*numbers: float) -> Tensor:
    return torch.tensor([numbers], dtype=torch.float64)


ALL_OF_THREE = torch.ones(1, 3, dtype=torch.bool)


def by_definition(rewards: list[float], values: list[float], discount: float, decay: float) -> list[float]:
    """Return the sums of equation 16, over the tokens of one trajectory, with the value 0 behind the last one."""
    following = [*values, 0.0][1:]
    differences = [r + discount * after - v for r, after, v in zip(rewards, following, values, strict=True)]
    return [
        math.fsum((discount * decay) ** (later - t) * differences[later] for later in range(t, len(rewards)))
        for t in range(len(rewards))
    ]


def test_three_tokens_worked_by_hand() -> None:
    # d_2 = 1 - 0.6; d_1 = 0.9 * 0.6 - 0.5; d_0 = 0.9 * 0.5 - 0.2; A_1 = 0.04 + 0.72 * 0.4; A_0 = 0.25 + 0.72 * 0.328
    found = generalized_advantages(row(0, 0, 1), row(0.2, 0.5, 0.6), ALL_OF_THREE, discount=0.9, decay=0.8)
    torch.testing.assert_close(found, row(0.48616, 0.328, 0.4))


@pytest.mark.parametrize(
    ("decay", "expected"),
    [(1.0, (1 - 0.2, 1 - 0.5, 1 - 0.6)), (0.0, (0.5 - 0.2, 0.6 - 0.5, 1 - 0.6))],
    ids=["the return less the value", "differences of one step"],
)
def test_the_ends_of_lambda(decay: float, expected: tuple[float, ...]) -> None:
    found = generalized_advantages(row(0, 0, 1), row(0.2, 0.5, 0.6), ALL_OF_THREE, discount=1.0, decay=decay)
    torch.testing.assert_close(found, row(*expected))


@pytest.mark.parametrize(("discount", "decay"), [(1.0, 0.95), (0.97, 0.9), (1.0, 1.0)])
def test_it_is_the_definition_on_the_trained_tokens_alone(discount: float, decay: float) -> None:
    generator = torch.Generator().manual_seed(0)
    rewards, values = (torch.randn(5, 12, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(5, 12, generator=generator) < 0.6
    mask[4] = False
    values = values.where(mask, torch.inf)
    found = generalized_advantages(rewards.where(mask, 0.0), values, mask, discount=discount, decay=decay)
    for number in range(5):
        trained = mask[number]
        expected = by_definition(rewards[number, trained].tolist(), values[number, trained].tolist(), discount, decay)
        torch.testing.assert_close(found[number, trained], torch.tensor(expected, dtype=torch.float64))
        assert not found[number, ~trained].any()


def test_rewards_of_turns_stand_at_the_ends_of_turns() -> None:
    turns = torch.tensor([[-1, 0, 0, -1, 1, 1, 2], [-1, 0, -1, -1, -1, -1, -1], [-1, -1, -1, 2, -1, -1, -1]])
    mask = turns >= 0
    mask[0, 5] = False  # sampled, and not trained on
    turn_rewards = torch.tensor([[1.0, 2.0, 4.0], [1.0, 0.0, 0.0], [1.0, 2.0, 4.0]], dtype=torch.float64)
    found = token_rewards(torch.tensor([15.0, 1.5, 15.0], dtype=torch.float64), turn_rewards, turns, mask)
    assert found.tolist() == [
        [0, 0, 1, 0, 2, 0, 4 + 8],
        [0, 1 + 0.5, 0, 0, 0, 0, 0],
        [0, 0, 0, 4 + 8, 0, 0, 0],  # nobody has earned the rewards of turns before the first trained token
    ]


def test_nothing_is_trained_on() -> None:
    none = torch.zeros(1, 3, dtype=torch.bool)
    rewards = token_rewards(torch.tensor([3.0]), torch.tensor([[1.0]]), torch.full((1, 3), -1), none)
    assert not rewards.any()
    assert not whitened(rewards, none).any()


def test_whitening_is_over_the_trained_tokens_of_the_step() -> None:
    advantages = torch.tensor([[1.0, 2.0, 99.0], [3.0, 6.0, 99.0]], dtype=torch.float64)
    mask = advantages < 99
    found = whitened(advantages, mask)
    spread = math.sqrt((4 + 1 + 0 + 9) / 3 + 1e-8)
    torch.testing.assert_close(found[mask], torch.tensor([-2, -1, 0, 3], dtype=torch.float64) / spread)
    assert not found[~mask].any()
    assert whitened(row(5.0), torch.ones(1, 1, dtype=torch.bool)).tolist() == [[0.0]]


def test_explained_variance() -> None:
    returns = torch.tensor([0.0, 1.0, 2.0, 5.0])
    assert explained_variance(returns + 3, returns) == 1, "a constant error costs nothing"
    assert explained_variance(torch.full((4,), 2.0), returns) == 0
    # Variances: 3.5 of the returns; errors 0, 1, 0, -1 have 0.5.
    assert explained_variance(torch.tensor([0.0, 0.0, 2.0, 6.0]), returns) == pytest.approx(1 - 0.5 / 3.5)
    assert math.isnan(explained_variance(returns, torch.ones(4)))
    assert math.isnan(explained_variance(returns[:0], returns[:0]))
