# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Means over the pairs of a global batch, for losses that compare two responses."""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from nemo_rl_moe.metrics import Reduction
from nemo_rl_moe.models.interfaces import LossInputs


@dataclass(frozen=True)
class PairMeans:
    """Means over the pairs of the global batch: this microbatch's shares, which add up to the means.

    Pairs are adjacent sequences: the chosen response, then the rejected one.

    Attributes:
        valid: False for pairs that only fill up a batch, and so have no response.
        num_pairs: Number of pairs of the global batch.
    """

    valid: Bool[Tensor, " pairs"]
    num_pairs: int

    @staticmethod
    def of(inputs: LossInputs) -> "PairMeans":
        """Return the means of a microbatch."""
        responds = inputs.token_mask.any(dim=1)
        return PairMeans(responds[0::2] & responds[1::2], max(inputs.global_sequences // 2, 1))

    def __call__(self, values: Float[Tensor, " pairs"]) -> Float[Tensor, ""]:
        """Return the share of a mean. Multiplication by 0 would not remove a NaN of a pair that does not count."""
        return values.where(self.valid, 0.0).sum() / self.num_pairs

    def metrics(self, means: Mapping[str, Tensor], inputs: LossInputs) -> dict[str, tuple[Tensor, Reduction]]:
        """Return means as metrics, with `num_valid_pairs` and `num_valid_tokens`, the numbers of pairs and of response
        tokens of the global batch."""
        metrics = {name: (value.detach(), Reduction.SEQUENCE_SHARE) for name, value in means.items()}
        metrics["num_valid_pairs"] = (self.valid.sum(), Reduction.SUM)
        metrics["num_valid_tokens"] = (inputs.token_mask.sum(), Reduction.SUM)
        return metrics
