# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Top-k router that hands on the chosen experts' indices instead of a map over all experts."""

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_rl_moe.models.megatron import cpu_backend  # noqa: F401  (before megatron.core)

# isort: split
from megatron.core.transformer.moe.router import TopKRouter


class IndexTopKRouter(TopKRouter):
    """`TopKRouter` for one rank with softmax scores and at most the plain auxiliary loss.

    Probabilities, gradients and the recorded auxiliary loss are the stock router's. See `eligibility` for what it
    leaves out.

    Attributes:
        last_topk_indices: `[tokens, k]`, the experts chosen in the last forward pass, best first; None before it.
    """

    last_topk_indices: Tensor | None = None

    def forward(self, input: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Routes each token.

        Args:
            input: `[sequence, batch, hidden]`.
            padding_mask: `[sequence, batch]`, True for padding, which does not count in the auxiliary loss but is
                routed like any token.

        Returns:
            Probabilities and expert indices, both `[tokens, k]` with tokens = sequence x batch.
        """
        logits = self.gating(input).view(-1, self.num_experts)
        probs, indices = self._choose(logits)
        # Not when a checkpointed segment runs without gradients: its second pass counts.
        if self.training and torch.is_grad_enabled() and self.is_aux_loss_enabled():
            probs = self._attach_auxiliary_loss(logits, probs, indices, padding_mask)
        self.last_topk_indices = indices
        return probs, indices

    def evaluate(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Routes `[tokens, hidden]` as `forward` does, and leaves no trace: nothing counts, nothing is kept."""
        weight = self.weight
        as_it_is = self.config.moe_router_dtype is None or (
            self.config.moe_router_dtype == "fp32" and tokens.dtype == weight.dtype == torch.float32
        )
        return self._choose(F.linear(tokens, weight) if as_it_is and self.bias is None else self.gating(tokens))

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        if self.config.moe_router_pre_softmax:
            scores = logits.softmax(-1, dtype=torch.float32).type_as(logits)
            probs, indices = scores.topk(self.topk, dim=-1)
        else:
            chosen, indices = logits.topk(self.topk, dim=-1)
            probs = chosen.softmax(-1, dtype=torch.float32).type_as(logits)
        if self.config.moe_router_topk_scaling_factor:
            probs = probs * self.config.moe_router_topk_scaling_factor
        return probs, indices

    def _attach_auxiliary_loss(
        self, logits: Tensor, probs: Tensor, indices: Tensor, padding_mask: Tensor | None
    ) -> Tensor:
        scores = logits.softmax(-1, dtype=torch.float32)
        if padding_mask is None:
            valid_tokens, score_sums = indices.size(0), scores.sum(0)
        else:
            valid = ~padding_mask.reshape(-1)
            indices = indices[valid]
            # A microbatch of padding alone has no loss; the stock router divides by zero.
            valid_tokens, score_sums = max(indices.size(0), 1), valid.to(scores.dtype) @ scores
        tokens_per_expert = indices.reshape(-1).bincount(minlength=self.num_experts)
        coefficient = self.get_aux_loss_coeff("aux_loss")
        scale = self.num_experts * coefficient / (self.topk * valid_tokens * valid_tokens)
        loss = (score_sums * tokens_per_expert).sum() * scale
        return self.attach_and_log_load_balancing_loss(
            probs, coefficient, loss, "load_balancing_loss", self.tp_cp_group, valid_token_count=valid_tokens
        )
