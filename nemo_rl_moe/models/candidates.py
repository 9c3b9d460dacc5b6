# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Candidate tokens at each position: ids that a model gets, and log-probabilities that it returns."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nemo_rl_moe.distributed.batch import Column, Destination, per_token

CANDIDATE_IDS = "candidate_ids"
"""Column for the model, `[batch, sequence, k]`: at each position the candidates for the next token."""


@dataclass(frozen=True)
class Candidates:
    """Candidates for each token of a batch: `k` distinct token ids, such as the most probable tokens of a teacher.

    Their log-probabilities are given the token's prefix, in nats.

    The values for the first token of a sequence and for padding are undefined.
    """

    ids: Int[Tensor, "batch sequence k"]
    logprobs: Float[Tensor, "batch sequence k"]


def candidate_column(ids: Int[Tensor, "batch sequence k"]) -> Column:
    """Return the column `candidate_ids`, in which the candidates for a token are at the position before the token."""
    return per_token(torch.nn.functional.pad(ids[:, 1:], (0, 0, 0, 1)), Destination.MODEL)
