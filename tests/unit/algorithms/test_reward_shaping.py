# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The soft punishment of long responses, by hand."""

import pytest
import torch

from nemo_rl_moe.algorithms.advantages import shape_rewards
from nemo_rl_moe.config.schema_grpo import RewardShapingConfig


def config_of(enabled: bool = True, buffer: int = 4, penalty: float = 1.0) -> RewardShapingConfig:
    return RewardShapingConfig(enabled=enabled, overlong_buffer_length=buffer, overlong_buffer_penalty=penalty)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_punishment_by_hand(dtype: torch.dtype) -> None:
    lengths = torch.tensor([1, 16, 17, 18, 19, 20, 25])
    rewards = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.5, 1.0, 1.0], dtype=dtype)
    given = rewards.clone()
    shaped = shape_rewards(rewards, lengths, 20, config_of())
    # Sixteen tokens for nothing, a quarter for each of the next four.
    assert shaped.tolist() == [1.0, 1.0, 0.75, -0.5, -0.25, 0.0, 0.0]
    assert shaped.dtype is dtype
    assert torch.equal(rewards, given)
    at_full_length = shape_rewards(torch.zeros(2, 2), torch.tensor([[10, 18], [19, 20]]), 20, config_of(penalty=8.0))
    assert at_full_length.tolist() == [[0.0, -4.0], [-6.0, -8.0]]
    buffer_of_all = shape_rewards(torch.zeros(3), torch.tensor([0, 1, 4]), 4, config_of())
    assert buffer_of_all.tolist() == [0.0, -0.25, -1.0], "it costs from the first token"


def test_not_enabled_changes_nothing() -> None:
    rewards = torch.tensor([1.0, 0.0])
    assert torch.equal(shape_rewards(rewards, torch.tensor([20, 20]), 20, config_of(enabled=False)), rewards)
