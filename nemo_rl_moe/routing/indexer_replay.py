# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Indexer replay: attention sees the tokens that the rollout's indexers chose, as routers take the rollout's experts.

A *row* has the positions that the indexer of one layer chose for one token, counted from the start of the sequence.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nemo_rl_moe.routing.agreement.indexer_rows import Indexed
from nemo_rl_moe.routing.replay import UNKNOWN
from nemo_rl_moe.shapes import Bool, Int

INDEXER_POSITIONS = "indexer_positions"
"""Column of a batch: positions that each token sees in each layer with an indexer, `[batch, sequence, layers, k]`,
int32, `UNKNOWN` after the last one."""


class ChosenKeys(NamedTuple):
    """One indexer's choice for the tokens of one pass, all rows of a column after another.

    Attributes:
        taken: The positions that attention used: the captured ones under replay.
    """

    live: Int[Tensor, "tokens k"]
    taken: Int[Tensor, "tokens k"]


class CapturedKeys(NamedTuple):
    """Captured rows of the tokens of a pass, with what is wrong with them.

    Attributes:
        positions: `UNKNOWN` in rows that are not usable.
        usable: Rows that name as many different positions as the token can see, none after the token. Only these are
            replayed.
        kinds: Kind of rows -> True for the rows of this kind.
    """

    positions: Int[Tensor, "tokens layers k"]
    usable: Bool[Tensor, "tokens layers"]
    kinds: dict[Indexed, Bool[Tensor, "tokens layers"]]

    @classmethod
    def of(
        cls, captured: Int[Tensor, "tokens layers k"], places: Int[Tensor, " tokens"], sequences: Int[Tensor, " tokens"]
    ) -> "CapturedKeys":
        """Check captured rows.

        Args:
            places: Position of each token in its sequence.
            sequences: Index of each token's sequence, from 0.
        """
        topk, place = captured.shape[-1], places[:, None]
        known = captured != UNKNOWN
        has_any, highest = known.any(-1), captured.amax(-1)
        repeated = torch.stack([_has_repeated(of_layer) for of_layer in captured.unbind(1)], 1)
        negative = (captured < UNKNOWN).any(-1)
        ahead = has_any & (highest > place)
        short = has_any & (known.sum(-1) < (place + 1).clamp(max=topk))
        lowest = captured.where(known, torch.iinfo(captured.dtype).max).flatten(1).amin(1)
        start = lowest.new_full((len(lowest) + 1,), torch.iinfo(captured.dtype).max)
        start = start.scatter_reduce_(0, sequences, lowest, "amin")[sequences, None]
        shifted = ahead & (start > 0) & (highest - start <= place)
        usable = has_any & ~(repeated | negative | ahead | short)
        kinds = {
            Indexed.ROWS: torch.ones_like(has_any),
            Indexed.AHEAD: ahead,
            Indexed.SHIFTED: shifted,
            Indexed.REPEATED: repeated,
            Indexed.NEGATIVE: negative,
            Indexed.MISSING: ~has_any,
            Indexed.SHORT: short,
            Indexed.USABLE: usable,
        }
        return cls(captured.where(usable[..., None], UNKNOWN), usable, kinds)


def _has_repeated(rows: Int[Tensor, "tokens k"]) -> Bool[Tensor, " tokens"]:
    """Return True for rows that name a position twice. Called layer by layer, because a sort takes much memory."""
    ordered = rows.sort(-1).values
    return ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != UNKNOWN)).any(-1)


def replayed_keys(live: Int[Tensor, "*tokens k"], captured: Int[Tensor, "*tokens k"]) -> Int[Tensor, "*tokens k"]:
    """Return the captured positions of each token, or its indexer's own choice if the captured row is not usable."""
    return torch.where((captured != UNKNOWN).any(-1, keepdim=True), captured, live)


def num_common(some: Int[Tensor, "tokens k"], others: Int[Tensor, "tokens k"], longest: int) -> Int[Tensor, " tokens"]:
    """Return the number of positions of each token that both choices name.

    Args:
        longest: Number of tokens of the longest sequence.
    """
    named = torch.zeros(len(some), longest + 1, dtype=torch.bool, device=some.device)
    named.scatter_(1, others.long().masked_fill(others < 0, longest), True)
    named[:, longest] = False
    return named.gather(1, some.long().masked_fill(some < 0, longest)).sum(-1)
