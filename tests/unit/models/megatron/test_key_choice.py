# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Choice of keys by an indexer's scores: against plain loops, with ties, packed, in blocks and cut among ranks."""

from unittest import mock

import pytest
import torch
from torch import Tensor

from nemo_rl_moe.models.megatron.layers import key_choice
from nemo_rl_moe.models.megatron.layers.key_choice import (
    NO_POSITION,
    best_keys,
    chosen_in_sequences,
    key_scores,
    mask_of,
    positions_of,
)

TOPK, HEADS, DIM = 3, 5, 4


def indexed(tokens: int, rows: int = 2, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, weights of heads and keys."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (tokens, rows, HEADS, DIM), (tokens, rows, HEADS), (tokens, rows, DIM)
    query, weights, key = (torch.randn(shape, generator=generator) for shape in shapes)
    return query, weights, key


def choice_of(scores: list[float], topk: int) -> list[int]:
    """Return the positions of the highest scores, the earlier ones among equal ones."""
    return sorted(sorted(range(len(scores)), key=lambda place: (-scores[place], place))[:topk])


def chosen_by_loops(query: Tensor, weights: Tensor, key: Tensor) -> list[list[list[int]]]:
    """Return the positions of each token of each row of one sequence, by float64 numbers and Python's sort."""
    found = []
    for token in range(len(query)):
        found.append([])
        for row in range(query.shape[1]):
            scores = [
                sum(
                    float(weights[token, row, head].double())
                    * max(float(query[token, row, head].double() @ key[place, row].double()), 0.0)
                    for head in range(HEADS)
                )
                for place in range(token + 1)
            ]
            found[-1].append(choice_of(scores, TOPK))
    return found


def as_lists(chosen: Tensor) -> list[list[list[int]]]:
    return [[[int(place) for place in row if place != NO_POSITION] for row in token] for token in chosen]


def test_each_token_gets_the_best_keys_up_to_its_own() -> None:
    query, weights, key = indexed(9)
    chosen = chosen_in_sequences(query, weights, key, [9], 0, TOPK)
    assert chosen.dtype is torch.int32
    assert as_lists(chosen) == chosen_by_loops(query, weights, key)


def test_scores_are_those_of_the_paper() -> None:
    query, weights, key = indexed(4)
    expected = torch.einsum("qrh,rqhk->rqk", weights, torch.einsum("qrhd,krd->rqhk", query, key).clamp_min(0))
    assert torch.allclose(key_scores(query, weights, key), expected)
    # Without the positive part the choice would be another one.
    assert not torch.allclose(torch.einsum("qrh,qrhd,krd->rqk", weights, query, key), expected)


def test_of_equal_scores_the_earlier_keys_are_chosen() -> None:
    scores = torch.tensor([[[0.0, 1.0, 0.0, 0.0, 2.0, 0.0], [0.0] * 6, [3.0, 0.0, -1.0, -1.0, 0.0, -1.0]]])
    visible = torch.ones(3, 6, dtype=torch.bool)
    chosen = positions_of(best_keys(scores, visible, TOPK), TOPK)
    assert chosen.tolist() == [[choice_of(row, TOPK) for row in scores[0].tolist()]]
    assert chosen[0].tolist() == [[0, 1, 4], [0, 1, 2], [0, 1, 4]]


def test_hidden_keys_are_never_chosen() -> None:
    scores = torch.full((1, 2, 5), -1.0)
    visible = torch.tensor([[True, False, True, False, False], [False, True, True, True, True]])
    chosen = positions_of(best_keys(scores, visible, TOPK), TOPK)
    assert chosen.tolist() == [[[0, 2, NO_POSITION], [1, 2, 3]]]


def test_a_mask_and_its_positions_are_the_same_choice() -> None:
    mask = torch.rand(7, 2, 11, generator=torch.Generator().manual_seed(3)) < 0.3
    assert torch.equal(mask_of(positions_of(mask, 11), 11), mask)


@pytest.mark.parametrize("lengths", [[9], [4, 1, 2, 2], [2, 7]])
@pytest.mark.parametrize("parts", [1, 3])
def test_packed_sequences_choose_as_alone_and_on_several_ranks(lengths: list[int], parts: int) -> None:
    query, weights, key = indexed(9, rows=1)
    sequences = zip(query.split(lengths), weights.split(lengths), key.split(lengths), strict=True)
    alone = [place for sequence in sequences for place in chosen_by_loops(*sequence)]
    size = 9 // parts
    cut = [
        chosen_in_sequences(query[start : start + size], weights[start : start + size], key, lengths, start, TOPK)
        for start in range(0, 9, size)
    ]
    assert as_lists(torch.cat(cut)) == alone


@pytest.mark.parametrize("first", [0, 3])
def test_blocks_of_queries_choose_as_all_at_once(first: int) -> None:
    query, weights, key = indexed(9)
    query, weights = query[first:], weights[first:]
    at_once = chosen_in_sequences(query, weights, key, [9], first, TOPK)
    with mock.patch.object(key_choice, "_MOST_PRODUCTS", 2 * 9 * 2 * HEADS):
        assert torch.equal(chosen_in_sequences(query, weights, key, [9], first, TOPK), at_once)
