# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Counts what a router chose: on the device, without waiting for it."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor


def add_assignments(
    counts: Int[Tensor, " experts"],
    chosen: Bool[Tensor, "tokens experts"] | Int[Tensor, "tokens topk"],
    valid: Bool[Tensor, " tokens"] | None,
) -> None:
    """Adds one router call to the counts, in place.

    Args:
        counts: Assignments of each expert so far, int64.
        chosen: A map of the assignments, or the numbers of the experts that each token goes to.
        valid: Tokens that count; None: all of them.
    """
    if chosen.dtype == torch.bool:
        counts.add_((chosen if valid is None else chosen & valid[:, None]).sum(0))
        return
    # Not bincount, which waits for the device to learn the largest number.
    chosen = chosen.long()
    ones = torch.ones_like(chosen) if valid is None else valid.long()[:, None].expand_as(chosen)
    counts.scatter_add_(0, chosen.reshape(-1), ones.reshape(-1))
