# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Lag of a sampled token: the number of optimizer steps between the weights that sampled it and the weights that train
on it.

Metrics by lag use five fixed classes of lags, so that their shapes are the same on every rank.
"""

from typing import TYPE_CHECKING

from nemo_rl_moe.shapes import Int

if TYPE_CHECKING:
    # Loggers and the report use the names without torch.
    from torch import Tensor

TOKEN_LAG = "token_lag"
"""Name of the batch column with the lag of each token, in optimizer steps."""
NO_LAG = -1
"""Lag and class of lag of a token that no model has sampled, such as a token of a prompt."""
LOWEST_LAGS = (0, 1, 2, 3, 5)
LAG_CLASSES = ("0", "1", "2", "3_to_4", "5_or_more")
"""Names, in metrics, of the classes of lags: numbers of optimizer steps."""


def lag_classes(lags: "Int[Tensor, '*shape']") -> "Int[Tensor, '*shape']":
    """Return the index in `LAG_CLASSES` of the class of each lag. `NO_LAG` stays `NO_LAG`."""
    found = (lags >= 0).int() - 1
    for lowest in LOWEST_LAGS[1:]:
        found += lags >= lowest
    return found
