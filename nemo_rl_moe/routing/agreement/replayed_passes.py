# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Forward passes with their captures. Passes are joined before they are counted, because on small models an operation
costs its launch rather than its tokens."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_rl_moe.routing.replay import ReplayRoutes, RoutedTokens
from nemo_rl_moe.shapes import Bool, Int

MOST_ENTRIES = 1 << 18
"""Largest number of captured experts in joined passes. A larger pass is counted immediately, to free its memory."""


@dataclass(frozen=True)
class ReplayedPass:
    """Forward pass of some layers over one or several successive microbatches, and the capture for its tokens.

    Attributes:
        distance: Number of positions from a token to the next one of the same sequence.
        follows: Whether each token has a predecessor at that distance.
        lags: Lag of the token that follows each row, if the batch has lags.
    """

    tokens: Mapping[int, int]
    routes: ReplayRoutes
    fed: Bool[Tensor, " tokens"]
    seen: Sequence[RoutedTokens]
    distance: int
    follows: Bool[Tensor, " tokens"]
    lags: Int[Tensor, " tokens"] | None = None

    @property
    def num_entries(self) -> int:
        return self.routes.planes.numel()


def join_passes(passes: Sequence[ReplayedPass]) -> ReplayedPass:
    """Return one pass over the tokens of several passes with the same layers and distance."""
    if len(passes) == 1:
        return passes[0]
    routes = ReplayRoutes(*(torch.cat(parts, -1) for parts in zip(*(each.routes for each in passes), strict=True)))
    return ReplayedPass(
        {number: count for each in passes for number, count in each.tokens.items()},
        routes,
        torch.cat([each.fed for each in passes]),
        [_join_tokens(of_layer) for of_layer in zip(*(each.seen for each in passes), strict=True)],
        passes[0].distance,
        torch.cat([each.follows for each in passes]),
        None if passes[0].lags is None else torch.cat([each.lags for each in passes if each.lags is not None]),
    )


def _join_tokens(parts: Iterable[RoutedTokens]) -> RoutedTokens:
    parts = tuple(parts)
    live = torch.cat([part.live for part in parts])
    taken = live if all(part.taken is part.live for part in parts) else torch.cat([part.taken for part in parts])
    margins = [part.margin for part in parts if part.margin is not None]
    return RoutedTokens(live, taken, torch.cat(margins) if len(margins) == len(parts) else None)
