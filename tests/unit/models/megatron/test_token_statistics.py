# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities and greedy matches against float64, whole and cut along the vocabulary."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_moe.models.megatron.training.token_statistics import token_statistics
from tests.support.gloo_ranks import run_ranks
from tests.support.tiny_model import layout, parallel_job, tiny_policy

VOCABULARY = 12


def logits_and_labels(scale: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    logits = scale * torch.randn(3, 7, VOCABULARY, generator=generator)
    return logits, torch.randint(0, VOCABULARY, (3, 7), generator=generator)


def expected(scale: float) -> tuple[Any, Any]:
    logits, labels = logits_and_labels(scale)
    logprobs = logits.double().log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    return logprobs.numpy(), (logits.argmax(-1) == labels).numpy()


def statistics_of_rank(scale: float, world_size: int, bfloat16: bool) -> tuple[Any, Any]:
    logits, labels = logits_and_labels(scale)
    with parallel_job(tiny_policy(world_size, **layout(tp=world_size))) as rank:
        part = logits.chunk(world_size, dim=-1)[rank]
        assert dist.group.WORLD is not None
        result = token_statistics(part.bfloat16() if bfloat16 else part, labels, dist.group.WORLD)
        return result.logprobs.numpy(), result.greedy_matches.numpy()


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.full), 2])
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_against_float64(world_size: int, scale: float) -> None:
    logprobs, greedy = expected(scale)
    assert 0 < greedy.sum() < greedy.size
    for ours, our_greedy in run_ranks(statistics_of_rank, world_size, scale, world_size, False):
        # Rounding is relative to the largest logit.
        np.testing.assert_allclose(ours, logprobs, atol=1e-6 * max(1.0, scale), rtol=1e-6)
        np.testing.assert_array_equal(our_greedy, greedy)


def test_bfloat16_logits_are_summed_in_float32() -> None:
    logits, labels = logits_and_labels(1.0)
    rounded = logits.bfloat16().double().log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    for ours, _ in run_ranks(statistics_of_rank, 2, 1.0, 2, True):
        np.testing.assert_allclose(ours, rounded.numpy(), atol=1e-6)


ONE_RANK: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 1)


def test_ties_for_the_first_place_count_as_first() -> None:
    logits = torch.tensor([[[2.0, 2.0, 1.0]]])
    for label, first in ((0, True), (1, True), (2, False)):
        assert token_statistics(logits, torch.tensor([[label]]), ONE_RANK).greedy_matches.item() is first


def test_masked_vocabulary_rows_take_no_probability() -> None:
    logits = torch.tensor([[[0.0, 0.0, torch.finfo(torch.float32).min]]])
    assert token_statistics(logits, torch.tensor([[1]]), ONE_RANK).logprobs.item() == pytest.approx(-np.log(2))


def test_input_stays_as_it_is() -> None:
    logits, labels = logits_and_labels(1.0)
    before = logits.clone()
    token_statistics(logits, labels, ONE_RANK)
    assert torch.equal(logits, before)
