# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule in chunks against the plain recurrence, packed sequences against each alone, with gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_rl_moe.models.megatron.layers.gated_delta_rule import (
    chunked_gated_delta_rule,
    l2_normalize,
    recurrent_gated_delta_rule,
)
from nemo_rl_moe.models.megatron.layers.recurrence import causal_convolution, segments_of
from tests.support.recurrences import LENGTHS, assert_close, boundaries, gradients, with_gradients

HEADS, KEY_DIM, VALUE_DIM = 3, 5, 4


def inputs(tokens: int, rows: int = 2, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Query, key, value, decay and rate; decays from almost none to forgetting at once."""
    generator = torch.Generator().manual_seed(seed)

    def sampled(*shape: int) -> Tensor:
        return torch.randn(rows, tokens, HEADS, *shape, generator=generator, dtype=torch.float64)

    decay = -torch.tensor([0.01, 1.0, 30.0], dtype=torch.float64) * F.softplus(sampled())
    found = [l2_normalize(sampled(KEY_DIM)), l2_normalize(sampled(KEY_DIM)), sampled(VALUE_DIM)]
    return [each.to(dtype) for each in (*found, decay, sampled().sigmoid())]


def test_recurrence_is_that_of_the_paper() -> None:
    query, key, value, decay, beta = inputs(4, rows=1)
    output, _ = recurrent_gated_delta_rule(query, key, value, decay, beta)
    for head in range(HEADS):
        state = torch.zeros(VALUE_DIM, KEY_DIM, dtype=torch.float64)
        for token in range(4):
            k, v, q = (each[0, token, head] for each in (key, value, query))
            rate = beta[0, token, head]
            # Equation 10: S_t = S_{t-1} (alpha (I - beta k k^T)) + beta v k^T
            state = decay[0, token, head].exp() * state @ (torch.eye(KEY_DIM) - rate * torch.outer(k, k))
            state = state + rate * torch.outer(v, k)
            torch.testing.assert_close(output[0, token, head], state @ q / KEY_DIM**0.5)


@pytest.mark.parametrize("tokens", [1, 7, 64, 70])
@pytest.mark.parametrize("chunk_size", [1, 4, 16, 64])
def test_chunks_of_any_size_are_the_recurrence(tokens: int, chunk_size: int) -> None:
    ours, plain = with_gradients(inputs(tokens)), with_gradients(inputs(tokens))
    output, state = chunked_gated_delta_rule(*ours, chunk_size=chunk_size)
    expected, last = recurrent_gated_delta_rule(*plain)
    assert_close([output, state], [expected, last])
    assert_close(gradients(output, ours), gradients(expected, plain))


@pytest.mark.parametrize("cut", [1, 5, 19])
@pytest.mark.parametrize("first", [chunked_gated_delta_rule, recurrent_gated_delta_rule])
def test_second_half_goes_on_from_the_state_of_the_first(cut: int, first: object) -> None:
    tensors = inputs(20)
    whole, last = recurrent_gated_delta_rule(*tensors)
    rule = chunked_gated_delta_rule if first is chunked_gated_delta_rule else recurrent_gated_delta_rule
    before, state = rule(*(each[:, :cut] for each in tensors))
    behind, end = recurrent_gated_delta_rule(*(each[:, cut:] for each in tensors), state=state)
    assert_close([torch.cat([before, behind], 1), end], [whole, last])
    again, end = chunked_gated_delta_rule(*(each[:, cut:] for each in tensors), state=state, chunk_size=4)
    assert_close([again, end], [behind, last])


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("chunk_size", [8, 64])
def test_packed_sequences_are_those_alone(lengths: list[int], chunk_size: int) -> None:
    ours, plain = with_gradients(inputs(sum(lengths), rows=1)), with_gradients(inputs(sum(lengths), rows=1))
    segments = segments_of(boundaries(lengths), sum(lengths))
    output, state = chunked_gated_delta_rule(*ours, segments=segments, chunk_size=chunk_size)
    parts = [recurrent_gated_delta_rule(*each) for each in zip(*(t.split(lengths, 1) for t in plain), strict=True)]
    expected = torch.cat([part for part, _ in parts], 1)
    assert_close([output, state], [expected, parts[-1][1]])
    assert_close(gradients(output, ours), gradients(expected, plain))


def test_sequences_in_front_leave_no_rounding_in_float32() -> None:
    """Sums of the decays in front, here of 10,000, would leave 1e-3 of every number."""
    tensors = inputs(40, rows=1, dtype=torch.float32)
    tensors[3][:, :20] *= 100
    segments = segments_of(boundaries([20, 20]), 40)
    output, _ = chunked_gated_delta_rule(*tensors, segments=segments)
    alone, _ = chunked_gated_delta_rule(*(each[:, 20:] for each in tensors))
    assert_close([output[:, 20:]], [alone], 2e-6)


@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize("lengths", [[2], [3, 9, 1, 6]])
def test_convolution_is_that_of_torch_in_each_sequence(taps: int, lengths: list[int]) -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(1, sum(lengths), 6, generator=generator, dtype=torch.float64)
    taps_of_channels = torch.randn(6, taps, generator=generator, dtype=torch.float64)
    ours, plain = with_gradients([values, taps_of_channels]), with_gradients([values, taps_of_channels])
    output = causal_convolution(*ours, segments=segments_of(boundaries(lengths), sum(lengths)))
    parts = [
        F.conv1d(F.pad(part.transpose(1, 2), (taps - 1, 0)), plain[1].unsqueeze(1), groups=6).transpose(1, 2)
        for part in plain[0].split(lengths, 1)
    ]
    assert_close([output], [torch.cat(parts, 1)])
    assert_close(gradients(output, ours), gradients(torch.cat(parts, 1), plain))


@pytest.mark.parametrize("cut", [1, 2, 5])
def test_convolution_goes_on_behind_earlier_inputs(cut: int) -> None:
    generator = torch.Generator().manual_seed(1)
    values, weight = torch.randn(2, 8, 3, generator=generator), torch.randn(3, 4, generator=generator)
    whole = causal_convolution(values, weight)
    before = F.pad(values, (0, 0, 3, 0))[:, cut : cut + 3]
    torch.testing.assert_close(causal_convolution(values[:, cut:], weight, before=before), whole[:, cut:])


def test_numbers_of_sequences() -> None:
    assert segments_of(torch.tensor([0, 2, 2, 5], dtype=torch.int32), 5).tolist() == [0, 0, 2, 2, 2]
