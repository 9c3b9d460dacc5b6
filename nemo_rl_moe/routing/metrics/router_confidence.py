# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Share of a router's scores that the chosen experts have."""

from typing import Literal

import torch
from torch import Tensor

from nemo_rl_moe.shapes import Bool, Float


def chosen_share(
    logits: Float[Tensor, "tokens experts"],
    chosen: Bool[Tensor, "tokens experts"],
    score_function: Literal["softmax", "sigmoid", "sqrtsoftplus"],
) -> Float[Tensor, " tokens"]:
    """Return the sum of the chosen experts' scores over the sum of all experts' scores, for each token.

    Scores are the score function of the logits, before the expert bias, normalisation over the chosen experts and
    scaling. This is `routing_confidence` of prime-rl.
    """
    scores = logits.float()
    if score_function == "softmax":
        scores = scores.softmax(-1)
    elif score_function == "sigmoid":
        scores = scores.sigmoid()
    else:
        scores = torch.nn.functional.softplus(scores).sqrt()
    return scores.where(chosen, 0.0).sum(-1) / scores.sum(-1)
