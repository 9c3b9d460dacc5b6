# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Averages over the global batch. Each function returns the share of one microbatch, and the shares add up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from nemo_rl_moe.config.schema import GRPOMasterConfig
    from nemo_rl_moe.config.schema_grpo import PolicyGradientLossConfig


def sequence_mean(
    values: Float[Tensor, "sequences targets"], mask: Bool[Tensor, "sequences targets"]
) -> Float[Tensor, "sequences 1"]:
    """Return the mean of each sequence over its valid tokens. It is 0 without valid tokens."""
    return values.where(mask, 0.0).sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)


def global_mean(
    values: Float[Tensor, "sequences targets"],
    mask: Bool[Tensor, "sequences targets"],
    global_valid_tokens: int,
    global_sequences: int,
    config: PolicyGradientLossConfig,
) -> Float[Tensor, ""]:
    """Return this microbatch's part of the configured mean over the global batch. The parts add up to the mean.

    - `token_level_loss: true`: mean over all valid tokens (DAPO, arXiv:2503.14476).
    - `length_normalizer`: mean over sequences of each sequence's sum over its tokens, divided by this constant (Dr.
      GRPO, arXiv:2503.20783), so that tokens of long and short responses count alike.
    - otherwise: mean over sequences of each sequence's mean over its tokens (GRPO, arXiv:2402.03300).
    """
    if config.token_level_loss:
        return values.where(mask, 0.0).sum() / max(global_valid_tokens, 1)
    if config.length_normalizer is not None:
        return values.where(mask, 0.0).sum() / (config.length_normalizer * max(global_sequences, 1))
    return sequence_mean(values, mask).sum() / max(global_sequences, 1)


def length_normalizer_has_a_sequence_loss(config: GRPOMasterConfig) -> Iterator[str]:
    """Check that `length_normalizer` is not combined with a mean over tokens or with ratios of sequences."""
    loss = config.loss_fn
    if loss.length_normalizer is None:
        return
    key = f"loss_fn.length_normalizer: got {loss.length_normalizer}, expected null with loss_fn."
    if loss.token_level_loss:
        yield f"{key}token_level_loss true, which divides by the tokens of the global batch"
    if loss.sequence_level_importance_ratios:
        yield (
            f"{key}sequence_level_importance_ratios true: the one ratio of a sequence would count as often as it has"
            " tokens"
        )


def sequence_ratios_have_a_sequence_loss(config: GRPOMasterConfig) -> Iterator[str]:
    """Check that the ratios of sequences (GSPO) are combined with a mean over sequences."""
    loss = config.loss_fn
    if loss.sequence_level_importance_ratios and loss.token_level_loss:
        yield (
            "loss_fn.token_level_loss: got true, expected false with loss_fn.sequence_level_importance_ratios true: a"
            " mean over tokens would count the one ratio of a sequence as often as it has tokens"
        )


AGGREGATION_RULES = (length_normalizer_has_a_sequence_loss, sequence_ratios_have_a_sequence_loss)
