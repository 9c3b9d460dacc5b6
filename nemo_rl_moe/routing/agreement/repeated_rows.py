# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Detection of repeated rows: a capture that gives one token's experts to the tokens after it too.

An engine that reads past the end of its buffer of routes repeats a valid row (sglang#36404: 67 times), and the
agreement of the capture with the routers falls only a little.
"""

from enum import IntEnum

import torch
from torch import Tensor

from nemo_rl_moe.routing.agreement.route_identity import RoutingAnomaly
from nemo_rl_moe.routing.replay import ReplayRoutes, all_of, num_in_common
from nemo_rl_moe.shapes import Bool, Int

_MOST_LAYERS = 4
"""Largest number of layers of a chunk that are compared. A repeated row is the same in all of them."""
_SIGMAS = 6.0


class Repeat(IntEnum):
    """Kinds of tokens that are counted to detect rows that repeat the experts of the previous token."""

    CAPTURE = 0
    """The capture repeats the experts of the previous token in every layer, and the routers would choose others."""
    ROUTER = 1
    """The routers would repeat the experts of the previous token in every layer, and the capture has others."""
    FED = 2
    """The token was an input of the model. It counts once per chunk of layers."""


class RepeatedRows:
    def __init__(self, device: torch.device):
        self.counts: Int[Tensor, " kinds"] = torch.zeros(len(Repeat), dtype=torch.long, device=device)

    def add(
        self,
        routes: ReplayRoutes,
        live: Int[Tensor, "topk layers tokens"],
        fed: Bool[Tensor, " tokens"],
        distance: int,
        follows: Bool[Tensor, " tokens"],
    ) -> None:
        """Count tokens that repeat the previous token's experts, in a pass of some layers over a microbatch."""
        of_capture_and_router = torch.stack([routes.planes[:, :_MOST_LAYERS], live[:, :_MOST_LAYERS]], 1)
        here, before = of_capture_and_router[..., distance:], of_capture_and_router[..., :-distance]
        repeated = all_of((num_in_common(here, before) == len(live)).transpose(0, 1))
        usable = all_of(routes.usable[:_MOST_LAYERS])
        # Near ties change an expert here and there. Most experts differ if the row belongs to another token.
        common = num_in_common(here[:, 0], here[:, 1]).sum(0)
        differs = 2 * common < here[:, 0, :, :1].numel()
        compared = (fed & follows & usable)[distance:] & usable[:-distance] & differs
        alone = repeated & ~repeated.flip(0) & compared
        self.counts += torch.cat([alone.sum(1), fed.sum()[None]])


def repeat_anomalies(counts: Int[Tensor, " kinds"]) -> list[RoutingAnomaly]:
    """Report captured rows that repeat the experts of the previous token, by McNemar's test (six standard deviations).

    If the routes belong to these tokens, repetitions in the capture alone (`Repeat.CAPTURE`) are as frequent as
    repetitions by the routers alone (`Repeat.ROUTER`). The difference of the two counts then has the standard deviation
    `sqrt(capture + router)`.
    """
    captured, by_router, fed = (int(counts[kind]) for kind in (Repeat.CAPTURE, Repeat.ROUTER, Repeat.FED))
    if captured - by_router <= _SIGMAS * (captured + by_router) ** 0.5:
        return []
    text = (
        f"{captured:,} of {fed:,} tokens carry the routes of the token before them in every layer, where routers would"
        f" choose others; only the routers repeat them for {by_router:,} tokens"
    )
    return [RoutingAnomaly("repeated", text)]
