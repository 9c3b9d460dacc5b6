# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Candidate tokens at each position: ids that travel to a model, and log-probabilities that come back."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nemo_rl_moe.distributed.batch import Column, Destination, per_token

CANDIDATE_IDS = "candidate_ids"
"""Column for the model, `[batch, sequence, k]`: at each position the candidates for the token behind it, which is what
the model predicts there."""


@dataclass(frozen=True)
class Candidates:
    """Distinct candidates for each token of a batch, and their log-probabilities given the tokens before it, in nats.

    Those of a sequence's first token, which nothing predicts, and of padding are any.
    """

    ids: Int[Tensor, "batch sequence k"]
    logprobs: Float[Tensor, "batch sequence k"]


def candidate_column(ids: Int[Tensor, "batch sequence k"]) -> Column:
    """Return the column of candidates for each token of a batch: a place earlier, where they are predicted."""
    return per_token(torch.nn.functional.pad(ids[:, 1:], (0, 0, 0, 1)), Destination.MODEL)
