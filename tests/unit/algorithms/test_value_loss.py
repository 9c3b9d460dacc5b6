# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The loss of a critic: its formula against float64, its gradient at a limit, and shares that add up."""

import numpy as np
import pytest
import torch
from torch import Tensor

from nemo_rl_moe.algorithms.losses.value import ValueLoss, clipped_squared_errors
from nemo_rl_moe.distributed.batch import per_token
from nemo_rl_moe.metrics import Reduction
from nemo_rl_moe.models.interfaces import Head, LossInputs, missing_heads, needs_of


def inputs_of(values: Tensor, returns: Tensor, previous: Tensor, mask: Tensor, num_valid: int) -> LossInputs:
    return LossInputs(
        logprobs=torch.zeros_like(values),
        token_mask=mask,
        global_valid_tokens=num_valid,
        global_sequences=len(values),
        greedy_matches=None,
        columns={"returns": per_token(returns), "previous_values": per_token(previous)},
        values=values,
    )


@pytest.fixture
def sampled() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    values, returns, previous = (torch.randn(6, 9, generator=generator) for _ in range(3))
    return values, returns, previous, torch.rand(6, 9, generator=generator) < 0.6


@pytest.mark.parametrize("clip_range", [None, 0.3])
def test_it_is_half_the_mean_clipped_squared_error(
    sampled: tuple[Tensor, Tensor, Tensor, Tensor], clip_range: float | None
) -> None:
    values, returns, previous, mask = sampled
    v, r, p = (each.double().numpy() for each in sampled[:3])
    errors = (v - r) ** 2
    if clip_range is not None:
        errors = np.maximum(errors, (np.clip(v, p - clip_range, p + clip_range) - r) ** 2)
    outputs = ValueLoss(clip_range)(inputs_of(values, returns, previous, mask, int(mask.sum())))
    assert float(outputs.loss) == pytest.approx(0.5 * errors[mask.numpy()].mean(), rel=1e-6)
    metrics = {name: (float(value), reduction) for name, (value, reduction) in outputs.metrics.items()}
    assert metrics["squared_error"][0] == pytest.approx(((v - r) ** 2)[mask.numpy()].mean(), rel=1e-6)
    assert metrics["value_mean"][0] == pytest.approx(v[mask.numpy()].mean(), rel=1e-5)
    assert metrics["num_valid_tokens"] == (int(mask.sum()), Reduction.SUM)
    assert ("clipped_fraction" in metrics) == (clip_range is not None)


def test_microbatches_add_up_and_masked_positions_do_not_count(sampled: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    values, returns, previous, mask = sampled
    values = values.where(mask, torch.inf)
    loss, num_valid = ValueLoss(0.3), int(mask.sum())
    whole = loss(inputs_of(values, returns, previous, mask, num_valid)).loss
    parts = [
        loss(inputs_of(values[rows], returns[rows], previous[rows], mask[rows], num_valid)).loss
        for rows in (slice(0, 1), slice(1, 6))
    ]
    assert float(sum(parts)) == pytest.approx(float(whole), rel=1e-6)


@pytest.mark.parametrize(
    ("value", "returned", "has_gradient"),
    [(0.5, 2.0, True), (1.5, 2.0, False), (1.5, 1.0, True), (-1.5, 2.0, True), (-1.5, -2.0, False)],
    ids=["within the range", "far towards the return", "past the return", "far away from it", "far down towards it"],
)
def test_a_value_that_has_moved_far_towards_its_return_is_left_alone(
    value: float, returned: float, has_gradient: bool
) -> None:
    moved = torch.tensor([[value]], requires_grad=True)
    clipped_squared_errors(moved, torch.tensor([[returned]]), torch.zeros(1, 1), 1.0).sum().backward()
    assert moved.grad is not None
    assert (float(moved.grad) != 0) == has_gradient


def test_it_needs_a_value_head_and_no_vocabulary() -> None:
    loss = ValueLoss()
    assert needs_of(loss) == {Head.VALUE}
    assert missing_heads(loss, {Head.LOGPROBS}) == {Head.VALUE}
    assert missing_heads(loss, {Head.VALUE}) == missing_heads(loss, {Head.LOGPROBS, Head.VALUE}) == set()


def test_what_is_masked_may_hold_anything(sampled: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    values, returns, previous, mask = sampled
    found = []
    for bad in (0.0, torch.nan, torch.inf):
        own = values.clone().requires_grad_()
        columns = [each.where(mask, bad) for each in (returns, previous)]
        outputs = ValueLoss(0.3)(inputs_of(own.where(mask, bad), *columns, mask, int(mask.sum())))
        outputs.loss.backward()
        assert own.grad is not None
        found.append((outputs.loss.detach(), own.grad, outputs.metrics["squared_error"][0]))
    for other in found[1:]:
        for one, another in zip(found[0], other, strict=True):
            assert torch.equal(one, another)
    assert found[0][1].abs().max() > 0
