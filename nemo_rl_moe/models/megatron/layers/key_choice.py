# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Choice of the keys that a query of sparse attention sees: those that its layer's indexer scores highest.

A choice is a mask over keys, or a list of positions in the sequence. Positions take less memory, are the same for
packed and padded sequences, and can be captured and replayed.
"""

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

NO_POSITION = -1
"""Entry of a list of positions after the last chosen position."""

_MOST_PRODUCTS = 2**25
"""Number of products of index queries and keys that exist at a time: 128 MB in float32."""


def key_scores(
    query: Float[Tensor, "queries rows heads dim"],
    weights: Float[Tensor, "queries rows heads"],
    key: Float[Tensor, "keys rows dim"],
) -> Float[Tensor, "rows queries keys"]:
    """Return the score of each key for each query: the sum over heads of weight times positive part of the product.

    Equation 1 of DeepSeek-V3.2 (https://arxiv.org/abs/2512.02556), in float32.
    """
    products = torch.einsum("qrhd,krd->rqhk", query.float(), key.float()).relu_()
    return torch.einsum("qrh,rqhk->rqk", weights.float(), products)


def best_keys(
    scores: Float[Tensor, "rows queries keys"], visible: Bool[Tensor, "*rows queries keys"], topk: int
) -> Bool[Tensor, "rows queries keys"]:
    """Return True for the `topk` visible keys of each query with the highest scores, or for all if they are fewer.

    Of keys with equal scores the earlier ones are chosen, so that the same scores always give the same choice.
    """
    if scores.shape[-1] <= topk:
        return visible.expand_as(scores)
    scores = scores.masked_fill(~visible, -torch.inf)
    last = scores.topk(topk, dim=-1).values[..., -1:]
    better = scores > last
    tied = (scores == last) & visible
    places = topk - better.sum(-1, keepdim=True)
    return better | (tied & (tied.cumsum(-1) <= places))


def choices_of_blocks(
    query: Float[Tensor, "queries rows heads dim"],
    weights: Float[Tensor, "queries rows heads"],
    key: Float[Tensor, "keys rows dim"],
    visible: Callable[[slice, int], Bool[Tensor, "*rows block some_keys"]],
    topk: int,
) -> Iterator[Bool[Tensor, "rows block some_keys"]]:
    """Yield the choice of consecutive blocks of queries, because the scores of all queries take much memory.

    A choice has the keys up to that of the block's last query. The last of all queries belongs to the last key.

    Args:
        visible: Function of a block of queries and its number of keys. It returns True for the keys that they may see.
    """
    before = key.shape[0] - query.shape[0]
    size = max(1, _MOST_PRODUCTS // (key.shape[0] * query.shape[1] * query.shape[2]))
    for start in range(0, query.shape[0], size):
        block = slice(start, min(start + size, query.shape[0]))
        keys = before + block.stop
        yield best_keys(key_scores(query[block], weights[block], key[:keys]), visible(block, keys), topk)


def positions_of(choice: Bool[Tensor, "*batch keys"], topk: int) -> Int[Tensor, "*batch topk"]:
    """Return the positions of a mask's at most `topk` chosen keys in rising order, int32, then `NO_POSITION`."""
    keys = choice.shape[-1]
    # The keys that are not chosen go to one more entry, which is dropped.
    entry = (choice.cumsum(-1) - 1).masked_fill_(~choice, topk)
    positions = torch.arange(keys, dtype=torch.int32, device=choice.device).expand(choice.shape)
    found = torch.full((*choice.shape[:-1], topk + 1), NO_POSITION, dtype=torch.int32, device=choice.device)
    return found.scatter_(-1, entry, positions)[..., :topk]


def first_positions(places: Int[Tensor, " tokens"], topk: int) -> Int[Tensor, "tokens topk"]:
    """Return all positions up to the tokens' own, for tokens at `places` that see all of them."""
    positions = torch.arange(topk, dtype=torch.int32, device=places.device)
    return torch.where(positions <= places[:, None], positions, NO_POSITION)


def mask_of(positions: Int[Tensor, "*batch topk"], keys: int) -> Bool[Tensor, "*batch keys"]:
    """Return the mask over `keys` keys of lists of positions. `NO_POSITION` chooses no key."""
    mask = torch.zeros((*positions.shape[:-1], keys + 1), dtype=torch.bool, device=positions.device)
    return mask.scatter_(-1, positions.long().masked_fill(positions < 0, keys), True)[..., :keys]


def chosen_in_sequences(
    query: Float[Tensor, "tokens rows heads dim"],
    weights: Float[Tensor, "tokens rows heads"],
    key: Float[Tensor, "all_tokens rows dim"],
    lengths: list[int],
    first: int,
    topk: int,
) -> Int[Tensor, "tokens rows topk"]:
    """Return the chosen positions of consecutive tokens, each within its own sequence.

    Args:
        key: Keys of the tokens of all sequences.
        lengths: Lengths of the sequences, one after another.
        first: Index of the first of the tokens with a query among all tokens.
    """
    found, start = [], 0
    for length in lengths:
        begin, end = max(start, first), min(start + length, first + query.shape[0])
        if begin < end:
            own = slice(begin - first, end - first)
            found.append(_chosen(query[own], weights[own], key[start : start + length], begin - start, topk))
        start += length
    return torch.cat(found)


def _chosen(query: Tensor, weights: Tensor, key: Tensor, first: int, topk: int) -> Tensor:
    """Return the chosen positions of the queries at positions from `first` on of one sequence."""
    last = first + query.shape[0]
    places = torch.arange(last, device=key.device)

    def visible(block: slice, keys: int) -> Tensor:
        return places[:keys] <= places[first + block.start : first + block.stop, None]

    blocks = choices_of_blocks(query, weights, key[:last], visible, topk)
    return torch.cat([positions_of(block, topk) for block in blocks], 1).transpose(0, 1)
