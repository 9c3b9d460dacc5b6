# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The loss of a reward model equals numbers worked by hand, and itself however the batch is cut."""

import math

import pytest
import torch
from torch import Tensor

from nemo_rl_moe.algorithms.losses.reward import RewardLoss
from nemo_rl_moe.data.margins import MARGINS
from nemo_rl_moe.distributed.batch import per_sequence
from nemo_rl_moe.metrics import Reduction
from nemo_rl_moe.models.interfaces import Head, LossInputs, missing_heads, needs_of, reduction_of


def inputs_of(scores: Tensor, margins: list[float] | None = None, num_sequences: int | None = None) -> LossInputs:
    """A microbatch of pairs with two response tokens each, by default the whole global batch."""
    mask = torch.tensor([[False, True, True]]).repeat(len(scores), 1)
    column = None if margins is None else torch.tensor(margins, dtype=torch.float64).repeat_interleave(2)
    columns = {} if column is None else {MARGINS: per_sequence(column)}
    total = len(scores) if num_sequences is None else num_sequences
    return LossInputs(torch.zeros(mask.shape), mask, int(mask.sum()), total, None, columns, scores=scores)


def scores_of(*scores: float) -> Tensor:
    return torch.tensor(scores, dtype=torch.float64, requires_grad=True)


def metrics_of(inputs: LossInputs, coefficient: float = 0.0) -> dict[str, float]:
    outputs = RewardLoss(coefficient)(inputs)
    return {name: float(value) for name, (value, _) in outputs.metrics.items()} | {"loss": outputs.loss.item()}


def softplus(value: float) -> float:
    return math.log1p(math.exp(value))


def test_it_is_bradley_terry_by_hand() -> None:
    found = metrics_of(inputs_of(scores_of(2.0, 0.5, -1.0, 1.0)))
    preference = (softplus(-1.5) + softplus(2.0)) / 2
    expected = {
        "loss": preference,
        "preference_loss": preference,
        "accuracy": 0.5,
        "rewards_chosen_mean": 0.5,
        "rewards_rejected_mean": 0.75,
        "reward_margin": -0.25,
        "num_valid_pairs": 2,
        "num_valid_tokens": 8,
    }
    assert found == pytest.approx(expected, rel=1e-12)


def test_margin_and_centre_by_hand() -> None:
    found = metrics_of(inputs_of(scores_of(2.0, 0.5, -1.0, 1.0), [1.0, -0.5]), 0.1)
    preference, center = (softplus(-0.5) + softplus(1.5)) / 2, (2.5**2 + 0.0) / 2
    assert found["preference_loss"] == pytest.approx(preference, rel=1e-12)
    assert found["center_loss"] == pytest.approx(center, rel=1e-12)
    assert found["loss"] == pytest.approx(preference + 0.1 * center, rel=1e-12)
    assert (found["accuracy"], found["reward_margin"]) == (0.5, -0.25), "of the scores alone"


def test_equal_scores_are_not_right() -> None:
    found = metrics_of(inputs_of(scores_of(1.0, 1.0)))
    assert (found["accuracy"], found["loss"]) == (0.0, pytest.approx(math.log(2)))


def test_gradients_by_hand() -> None:
    scores = scores_of(2.0, 0.5)
    RewardLoss(0.1)(inputs_of(scores, [1.0])).loss.backward()
    assert scores.grad is not None
    of_difference, of_sum = -1 / (1 + math.exp(0.5)), 0.1 * 2 * 2.5
    assert scores.grad.tolist() == pytest.approx([of_difference + of_sum, -of_difference + of_sum], rel=1e-12)


def test_shares_of_microbatches_add_up_and_fillers_do_not_count() -> None:
    values, margins = [2.0, 0.5, -1.0, 1.0, 0.3, 0.2], [1.0, -0.5, 0.25]
    whole = metrics_of(inputs_of(scores_of(*values), margins), 0.1)
    parts = []
    for row in range(3):
        inputs = inputs_of(scores_of(*values[2 * row : 2 * row + 2], 7.0, float("nan")), [margins[row], 0.0], 6)
        inputs.token_mask[2:] = False
        parts.append(metrics_of(inputs, 0.1))
    assert {name: sum(part[name] for part in parts) for name in whole} == pytest.approx(whole, rel=1e-12)


def test_large_scores_are_compared_before_they_are_rounded() -> None:
    scores = torch.tensor([4096.0, 4095.9995], dtype=torch.float32, requires_grad=True)
    outputs = RewardLoss(0.0)(inputs_of(scores))
    assert outputs.loss.dtype == torch.float32
    chosen, rejected = scores.detach().double().tolist()
    assert outputs.metrics["reward_margin"][0].item() == chosen - rejected > 0


def test_it_needs_scores_and_no_vocabulary() -> None:
    loss = RewardLoss(0.0)
    assert needs_of(loss) == {Head.SCORE}
    assert missing_heads(loss, {Head.LOGPROBS}) == missing_heads(loss, {Head.VALUE}) == {Head.SCORE}
    assert missing_heads(loss, {Head.SCORE}) == set()
    assert reduction_of(loss) is Reduction.SEQUENCE_SHARE
