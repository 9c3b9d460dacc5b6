# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Mamba-2's state space in chunks against the plain recurrence, packed sequences against each alone, with gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_rl_moe.models.megatron.layers.recurrence import segments_of
from nemo_rl_moe.models.megatron.layers.state_space import chunked_state_space, recurrent_state_space
from tests.support.recurrences import LENGTHS, assert_close, boundaries, gradients, with_gradients

HEADS, GROUPS, HEAD_DIM, STATE_DIM = 4, 2, 5, 3


def inputs(tokens: int, rows: int = 2, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Values, decays from almost none to forgetting at once, and the vectors into and out of the state."""
    generator = torch.Generator().manual_seed(0)

    def sampled(*shape: int) -> Tensor:
        return torch.randn(rows, tokens, *shape, generator=generator, dtype=torch.float64)

    decay = -torch.tensor([0.01, 1.0, 30.0, 0.1], dtype=torch.float64) * F.softplus(sampled(HEADS))
    found = [sampled(HEADS, HEAD_DIM), decay, sampled(GROUPS, STATE_DIM), sampled(GROUPS, STATE_DIM)]
    return [each.to(dtype) for each in found]


def test_outputs_are_the_masked_products_of_the_paper() -> None:
    value, decay, into, out_of = inputs(6, rows=1)
    output, _ = recurrent_state_space(value, decay, into, out_of)
    for head in range(HEADS):
        group = head // (HEADS // GROUPS)
        # arXiv:2405.21060, eq. 4: (L * C B^T) x, where L has the products of the decays between two tokens.
        sums = decay[0, :, head].cumsum(0)
        mask = (sums[:, None] - sums[None, :]).exp().tril()
        expected = mask * (out_of[0, :, group] @ into[0, :, group].T) @ value[0, :, head]
        torch.testing.assert_close(output[0, :, head], expected)


@pytest.mark.parametrize("tokens", [1, 7, 64, 70])
@pytest.mark.parametrize("chunk_size", [1, 4, 16, 64])
def test_chunks_of_any_size_are_the_recurrence(tokens: int, chunk_size: int) -> None:
    ours, plain = with_gradients(inputs(tokens)), with_gradients(inputs(tokens))
    output, state = chunked_state_space(*ours, chunk_size=chunk_size)
    expected, last = recurrent_state_space(*plain)
    assert_close([output, state], [expected, last])
    found, wanted = (torch.cat([one.flatten(), two.flatten()]) for one, two in ((output, state), (expected, last)))
    assert_close(gradients(found, ours), gradients(wanted, plain))


@pytest.mark.parametrize("cut", [1, 5, 19])
def test_second_half_goes_on_from_the_state_of_the_first(cut: int) -> None:
    tensors = inputs(20)
    whole, last = recurrent_state_space(*tensors)
    for rule in (chunked_state_space, recurrent_state_space):
        before, state = rule(*(each[:, :cut] for each in tensors))
        behind, end = recurrent_state_space(*(each[:, cut:] for each in tensors), state=state)
        assert_close([torch.cat([before, behind], 1), end], [whole, last])
        again, end = chunked_state_space(*(each[:, cut:] for each in tensors), state=state, chunk_size=4)
        assert_close([again, end], [behind, last])


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("chunk_size", [8, 64])
def test_packed_sequences_are_those_alone(lengths: list[int], chunk_size: int) -> None:
    ours, plain = with_gradients(inputs(sum(lengths), rows=1)), with_gradients(inputs(sum(lengths), rows=1))
    segments = segments_of(boundaries(lengths), sum(lengths))
    output, state = chunked_state_space(*ours, segments=segments, chunk_size=chunk_size)
    parts = [recurrent_state_space(*each) for each in zip(*(t.split(lengths, 1) for t in plain), strict=True)]
    expected = torch.cat([part for part, _ in parts], 1)
    assert_close([output, state], [expected, parts[-1][1]])
    assert_close(gradients(output, ours), gradients(expected, plain))


def test_sequences_in_front_leave_no_rounding_in_float32() -> None:
    tensors = inputs(40, rows=1, dtype=torch.float32)
    tensors[1][:, :20] *= 100
    output, _ = chunked_state_space(*tensors, segments=segments_of(boundaries([20, 20]), 40))
    alone, _ = chunked_state_space(*(each[:, 20:] for each in tensors))
    assert_close([output[:, 20:]], [alone], 2e-6)
