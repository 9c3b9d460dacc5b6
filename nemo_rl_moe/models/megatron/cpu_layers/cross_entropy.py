# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Cross entropy over an undivided vocabulary as one node of the graph."""

from typing import Any

import torch
from torch import Tensor


class CrossEntropyFunction(torch.autograd.Function):
    """Token losses of `[tokens, vocabulary]` logits; keeps the logits, builds the gradient in one buffer."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        """Returns the losses `[tokens]` in float32."""
        logits = logits.float()
        log_total = torch.logsumexp(logits, -1, keepdim=True)
        outside = (targets < 0) | (targets >= logits.size(-1))
        rows = targets.masked_fill(outside, 0).unsqueeze(-1)
        ctx.save_for_backward(logits, log_total, rows, outside)
        return (log_total - logits.gather(-1, rows)).squeeze(-1).masked_fill_(outside, 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Softmax less one at the target, times the gradient of each loss."""
        logits, log_total, rows, outside = ctx.saved_tensors
        grad_logits = (logits - log_total).exp_()
        grad_logits.scatter_add_(-1, rows, torch.full_like(log_total, -1.0))
        return grad_logits.mul_(grad.masked_fill(outside, 0.0).unsqueeze(-1)), None


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Loss of each token.

    Args:
        logits: `[sequence, batch, vocabulary]`, any floating type.
        labels: `[batch, sequence]`, token ids. One outside the vocabulary (such as -100) has loss and gradient zero.

    Returns:
        `[batch, sequence]`, in nats, float32.
    """
    sequence, batch, vocabulary = logits.shape
    losses = CrossEntropyFunction.apply(logits.reshape(-1, vocabulary), labels.t().reshape(-1))
    return losses.view(sequence, batch).t()
