# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Agreement of routers with a capture by lag: how far routing has moved since older weights sampled a token."""

import torch
from torch import Tensor

from nemo_rl_moe.routing.replay import ReplayRoutes, num_in_common
from nemo_rl_moe.shapes import Bool, Int
from nemo_rl_moe.token_lag import LAG_CLASSES, lag_classes

LagCounts = Int[Tensor, "classes 2"]
"""By class of lag: number of usable rows, and number of rows whose set of experts the routers would choose."""


class LagAgreement:
    """Counts of one training step on one rank, by lag: usable rows, and rows that the routers would choose as well.

    A row has the captured experts of one token in one layer.
    """

    def __init__(self, device: torch.device):
        self.counts: LagCounts = torch.zeros(len(LAG_CLASSES), 2, dtype=torch.long, device=device)
        self._classes = torch.arange(len(LAG_CLASSES), device=device)[:, None]

    def add(
        self,
        routes: ReplayRoutes,
        live: Int[Tensor, "topk layers tokens"],
        fed: Bool[Tensor, " tokens"],
        lags: Int[Tensor, " tokens"],
    ) -> None:
        """Count the rows of the forward pass of some layers.

        Args:
            lags: Lag of the token that follows each row, `NO_LAG` if no model sampled it.
        """
        usable = routes.usable & fed
        same = usable & (num_in_common(routes.planes, live) == len(live))
        of_tokens = torch.stack([usable, same]).sum(1)
        is_of_class = lag_classes(lags) == self._classes
        self.counts += (is_of_class[:, None] * of_tokens).sum(-1)


def live_agreement_key(lag_class: str) -> str:
    """Return the key of the agreement metric for one of `LAG_CLASSES`."""
    return f"routing/live_agreement_lag_{lag_class}"


def lag_agreement_metrics(counts: LagCounts) -> dict[str, float]:
    """Return the agreement of routers with the capture, for each class of lag that has usable rows."""
    return {
        live_agreement_key(name): same / usable
        for name, (usable, same) in zip(LAG_CLASSES, counts.tolist(), strict=True)
        if usable
    }
