# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The losses, by hand, and as parts that must add up whatever way a batch is cut."""

import math
import pickle

import pytest
import torch
from torch import Tensor

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.metrics import Reduction
from nemo_rl_moe.models.interfaces import LossInputs

MASKS = [[True, False, True], [False, True, True]]


def inputs_of(
    logprobs: Tensor, mask: Tensor, global_valid_tokens: int | None = None, greedy_matches: Tensor | None = None
) -> LossInputs:
    return LossInputs(
        logprobs=logprobs,
        token_mask=mask,
        global_valid_tokens=int(mask.sum()) if global_valid_tokens is None else global_valid_tokens,
        global_sequences=len(mask),
        greedy_matches=greedy_matches,
        columns={},
    )


def test_sft_loss_by_hand() -> None:
    logprobs = torch.tensor([[0.5, 0.1, 0.25], [0.1, 0.125, 1.0]], dtype=torch.float64).log()
    outputs = sft_loss(inputs_of(logprobs, torch.tensor(MASKS)))
    # 1/2 x 1/4 x 1/8 x 1 is 2^-6, over four tokens.
    assert outputs.loss.item() == pytest.approx(6 * math.log(2) / 4, rel=1e-15)
    assert outputs.loss.shape == ()
    assert outputs.metrics == {"num_valid_tokens": (torch.tensor(4), Reduction.SUM)}


def test_gradient_of_sft_loss() -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs = -torch.rand(2, 3, dtype=torch.float64, generator=generator)
    logprobs.requires_grad_()
    mask = torch.tensor(MASKS)

    def loss(values: Tensor) -> Tensor:
        return sft_loss(inputs_of(values, mask, global_valid_tokens=10)).loss

    assert torch.autograd.gradcheck(loss, (logprobs,))
    (gradient,) = torch.autograd.grad(loss(logprobs), logprobs)
    assert torch.equal(gradient, -mask.double() / 10)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_masked_reaches_neither_loss_nor_gradient(bad: float) -> None:
    mask = torch.tensor(MASKS)
    logprobs = torch.full((2, 3), -1.0, dtype=torch.float64).masked_fill(~mask, bad).requires_grad_()
    outputs = sft_loss(inputs_of(logprobs, mask))
    assert outputs.loss.item() == 1.0
    (gradient,) = torch.autograd.grad(outputs.loss, logprobs)
    assert torch.equal(gradient, -mask.double() / 4)


def test_a_bad_trained_token_is_not_hidden() -> None:
    mask = torch.tensor(MASKS)
    logprobs = torch.full((2, 3), -1.0).masked_fill(mask, math.nan)
    assert math.isnan(sft_loss(inputs_of(logprobs, mask)).loss.item())


def test_a_microbatch_without_trained_tokens_adds_nothing() -> None:
    logprobs = torch.full((2, 3), -1.0, requires_grad=True)
    outputs = sft_loss(inputs_of(logprobs, torch.zeros(2, 3, dtype=torch.bool), global_valid_tokens=5))
    outputs.loss.backward()
    assert outputs.loss.item() == 0.0
    assert logprobs.grad is not None
    assert logprobs.grad.abs().sum() == 0.0


@pytest.mark.parametrize("sizes", [[6], [1] * 6, [1, 5], [2, 3, 1]], ids=str)
def test_shares_add_up_however_the_batch_is_cut(sizes: list[int]) -> None:
    generator = torch.Generator().manual_seed(1)
    logprobs = -torch.rand(6, 7, dtype=torch.float64, generator=generator)
    # From one trained token to seven: a mean of means would weigh them differently.
    mask = torch.arange(7) < torch.tensor([1, 7, 2, 6, 3, 5])[:, None]
    matches = torch.rand(6, 7, generator=generator) < 0.5
    total = int(mask.sum())
    outputs = [
        sft_loss(inputs_of(values, counted, total, matched))
        for values, counted, matched in zip(logprobs.split(sizes), mask.split(sizes), matches.split(sizes), strict=True)
    ]
    assert sum(each.loss.item() for each in outputs) == pytest.approx(-logprobs[mask].mean().item(), rel=1e-14)
    assert {each.metrics["accuracy"][1] for each in outputs} == {Reduction.SHARE}
    shares = [each.metrics["accuracy"][0].item() for each in outputs]
    assert sum(shares) == pytest.approx(matches[mask].double().mean().item(), rel=1e-6)
    assert sum(each.metrics["num_valid_tokens"][0].item() for each in outputs) == total


def test_sft_loss_travels_to_workers() -> None:
    assert pickle.loads(pickle.dumps(sft_loss)) is sft_loss  # noqa: S301  (written on this line)


def test_metrics_carry_no_graph() -> None:
    logprobs = torch.full((2, 3), -1.0, requires_grad=True)
    outputs = sft_loss(inputs_of(logprobs, torch.tensor(MASKS), greedy_matches=torch.tensor(MASKS)))
    assert outputs.loss.requires_grad
    assert not any(value.requires_grad for value, _ in outputs.metrics.values())
