# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Routed experts of a response, for its reply."""

from dataclasses import dataclass
from typing import Any

from nemo_rl_moe.distributed.stored_rows import Fetch, StoredRows, fetch_rows
from nemo_rl_moe.routing.replay import UNKNOWN

Experts = list[list[list[int]] | None]
"""The experts of each token by MoE layer, best first. None for a token that the model did not compute."""


@dataclass(frozen=True)
class ServedRoutes:
    """Reader of the routed experts of an engine.

    Attributes:
        layers: Numbers of the MoE layers, from 0.
    """

    layers: tuple[int, ...]
    num_experts: int
    topk: int
    fetch: Fetch

    @property
    def description(self) -> dict[str, Any]:
        """The sizes of the MoE layers, as JSON."""
        return {"layers": list(self.layers), "num_experts": self.num_experts, "num_experts_per_token": self.topk}

    def experts(self, rows: StoredRows | None, num_tokens: int) -> Experts:
        """Fetch and return the experts of a sequence. It blocks."""
        shape = (len(self.layers), self.topk)
        [found] = fetch_rows([rows], num_tokens, UNKNOWN, self.fetch, shape, "int16")
        return [None if (of_token == UNKNOWN).all() else of_token.tolist() for of_token in found]
