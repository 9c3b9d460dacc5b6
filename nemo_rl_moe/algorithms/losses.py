# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Loss functions: pure functions from one microbatch to its share of the global batch's loss."""

from nemo_rl_moe.metrics import Reduction
from nemo_rl_moe.models.policy.interfaces import LossInputs, LossOutputs


def sft_loss(inputs: LossInputs) -> LossOutputs:
    """Mean negative log-likelihood of the trained tokens of the whole global batch.

    The divisor is the global batch's number of trained tokens, over all microbatches and ranks: a mean of means would
    weigh short sequences up and change with the micro-batch size.

    Returns:
        This microbatch's share of the mean, in nats. Metrics: `accuracy`, the share of the trained tokens that the
        model ranks first given what precedes them (evaluation only), and `num_valid_tokens`.
    """
    mask = inputs.token_mask
    # Where a padded position holds an infinite value, a product with 0 would make it NaN.
    loss = -inputs.logprobs.where(mask, 0.0).sum() / inputs.global_valid_tokens
    metrics = {"num_valid_tokens": (mask.sum(), Reduction.SUM)}
    if inputs.greedy_matches is not None:
        metrics["accuracy"] = ((inputs.greedy_matches & mask).sum() / inputs.global_valid_tokens, Reduction.SHARE)
    return LossOutputs(loss=loss, metrics=metrics)
