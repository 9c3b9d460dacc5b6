# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rows of a tape that stand more than once: one token's experts given to the tokens that follow.

An engine that reads its buffer of routes behind the end of what it has written, or too early, gives a well-shaped row
again and again (sglang#36404: one row, 67 times). Agreement falls only a little, and no other layer, token or sequence
agrees better with such a tape.
"""

from enum import IntEnum

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from nemo_rl_moe.moe.replay import in_order, usable_rows
from nemo_rl_moe.moe.tape_identity import TapeAnomaly

_MOST_LAYERS = 4
"""Layers of a chunk that are compared: rows that stand twice do so in all of them."""
_SIGMAS = 6.0


class Repeat(IntEnum):
    """Kinds of tokens, a column each."""

    TAPE = 0
    """Have the row of the token before in every layer on the tape alone: routers would choose other experts."""
    ROUTER = 1
    """The same the other way round: routers would choose the row of the token before, and the tape has another."""
    FED = 2
    """Fed to the model, in each chunk of layers."""


class RepeatedRows:
    """Counts of one step of training on one rank, on the device and without a host synchronisation.

    Args:
        num_experts: Routed experts of a layer.
        device: Where the routers run.

    Attributes:
        counts: One number for each `Repeat`.
    """

    def __init__(self, num_experts: int, device: torch.device):
        self._num_experts = num_experts
        self.counts: Int[Tensor, " kinds"] = torch.zeros(len(Repeat), dtype=torch.long, device=device)

    def add(
        self,
        routes: Int[Tensor, "tokens layers topk"],
        live: Int[Tensor, "tokens layers topk"],
        fed: Bool[Tensor, " tokens"],
        previous: Int[Tensor, " tokens"],
    ) -> None:
        """Adds the forward pass of some layers over a microbatch.

        Args:
            routes: The tape's experts.
            live: The routers' own choices.
            fed: Tokens that were fed to the model that made the tape.
            previous: Place of the token before in the same sequence; -1 where there is none.
        """
        tape, live = in_order(routes[:, :_MOST_LAYERS].to(live.dtype)), in_order(live[:, :_MOST_LAYERS])
        before = previous.clamp(min=0)
        usable = usable_rows(tape, self._num_experts).all(-1)
        # Near ties change an expert here and there; most of them differ where the row is another token's.
        common = (tape[..., :, None] == live[..., None, :]).any(-1).sum((1, 2))
        compared = fed & (previous >= 0) & usable & usable[before] & (2 * common < tape[0].numel())
        on_tape, by_router = _equal(tape, tape[before]).all(-1), _equal(live, live[before]).all(-1)
        alone = torch.stack([on_tape & ~by_router, by_router & ~on_tape]) & compared
        self.counts += torch.cat([alone.sum(1), fed.sum()[None]])


def _equal(some: Int[Tensor, "tokens layers topk"], others: Int[Tensor, "tokens layers topk"]) -> Tensor:
    return (some == others).all(-1)


def repeat_anomalies(counts: Int[Tensor, " kinds"]) -> list[TapeAnomaly]:
    """Rows that stand more than once.

    Routes of other tokens repeat as often as those of these tokens: then either kind of token is as frequent, and the
    difference has the standard deviation `sqrt(tape + router)` (McNemar's test); six of them count.

    Args:
        counts: Of the step, over all ranks.
    """
    on_tape, by_router, fed = (int(counts[kind]) for kind in (Repeat.TAPE, Repeat.ROUTER, Repeat.FED))
    if on_tape - by_router <= _SIGMAS * (on_tape + by_router) ** 0.5:
        return []
    text = (
        f"{on_tape:,} of {fed:,} tokens carry the routes of the token before them in every layer, where routers would"
        f" choose others; the other way round it is {by_router:,}"
    )
    return [TapeAnomaly("repeated", text)]
