# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities, greedy matches and entropies from logits that are sharded along the vocabulary."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from torch import Tensor

LOWEST_LOG_PROBABILITY = -1000.0
"""Lower bound for log-probabilities. Its exponential is 0, in float64 too. Without the bound, `p log p` would be NaN
for logits of minus infinity."""


class TokenStatistics(NamedTuple):
    """Statistics of each target token.

    Attributes:
        logprobs: Log-probabilities in nats. Entropies are in nats too.
        greedy_matches: Whether the target has the highest probability.
        values: Value of the state in which the target is chosen.
        candidates: Log-probabilities of the target's candidates.
    """

    logprobs: Float[Tensor, "*tokens"]
    greedy_matches: Bool[Tensor, "*tokens"] | None
    entropy: Float[Tensor, "*tokens"] | None = None
    values: Float[Tensor, "*tokens"] | None = None
    candidates: Float[Tensor, "*tokens k"] | None = None

    @staticmethod
    def of_values(values: Float[Tensor, "*tokens"]) -> "TokenStatistics":
        """Return the statistics of a pass that computes values only, with zeros as log-probabilities."""
        return TokenStatistics(torch.zeros_like(values), None, None, values)

    def over_kept(self, kept_tokens: Int[Tensor, "*tokens k"]) -> "TokenStatistics":
        """Return the statistics with log-probabilities over the tokens `K` that top-k and top-p kept in sampling.

        Requires that `candidates` are the log-probabilities of the kept tokens.

        A log-probability becomes `log p(y) - log sum_{v in K} p(v)`, the log-softmax with all logits outside of `K`
        masked ("keep sampling mask", DeepSeek-V3.2, arXiv:2512.02556, section 3.1). Positions without kept tokens stay
        the same. The entropy is still over the full vocabulary.
        """
        assert self.candidates is not None
        is_kept, is_cut = kept_tokens >= 0, kept_tokens[..., 0] >= 0
        log_mass = self.candidates.masked_fill(~is_kept & is_cut[..., None], -torch.inf).logsumexp(-1)
        return self._replace(logprobs=self.logprobs - log_mass.where(is_cut, 0.0), candidates=None)


class VocabularySums(NamedTuple):
    """Sums over the logits of each token, from which log-softmax and entropy are computed.

    The sums are over a rank's columns of the vocabulary, or over all columns.
    """

    highest: Float[Tensor, "*tokens"]
    exponentials: Float[Tensor, "*tokens"]
    weighted: Float[Tensor, "*tokens"] | None
    target: Float[Tensor, "*tokens"]

    @staticmethod
    def of_columns(
        logits: Float[Tensor, "*tokens local_vocabulary"],
        labels: Int[Tensor, "*tokens"],
        group: dist.ProcessGroup,
        *,
        with_entropy: bool = False,
    ) -> "VocabularySums":
        """Return the sums over this rank's columns of the vocabulary. Overwrites the logits."""
        target = logits_at(logits, labels[..., None], group)[..., 0]
        highest = logits.amax(-1)
        shifted = logits.sub_(highest[..., None])
        if not with_entropy:
            return VocabularySums(highest, shifted.exp_().sum(-1), None, target)
        exponentials = shifted.clamp_(min=LOWEST_LOG_PROBABILITY).exp()
        return VocabularySums(highest, exponentials.sum(-1), exponentials.mul_(shifted).sum(-1), target)

    @staticmethod
    def joined(pieces: Sequence["VocabularySums"]) -> "VocabularySums":
        """Return the sums of consecutive tokens, concatenated."""
        highest, exponentials, weighted, target = zip(*pieces, strict=True)
        return VocabularySums(
            torch.cat(highest),
            torch.cat(exponentials),
            None if weighted[0] is None else torch.cat(weighted),
            torch.cat(target),
        )

    def of_group(self, group: dist.ProcessGroup) -> "VocabularySums":
        """Return the sums over the full vocabulary, in two collectives for all tokens."""
        if group.size() == 1:
            return self
        highest = self.highest.clone()
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        lower = self.highest - highest
        scale = lower.exp()
        sums = [self.target, self.exponentials * scale]
        if self.weighted is not None:
            # In `exp(x - m) (x - m)`, the higher maximum `m` shifts both factors.
            lower = lower.clamp(min=LOWEST_LOG_PROBABILITY)
            sums.append(scale * (self.weighted + lower * self.exponentials))
        stacked = torch.stack(sums)
        dist.all_reduce(stacked, group=group)
        target, exponentials, *weighted = stacked
        return VocabularySums(highest, exponentials, weighted[0] if weighted else None, target)

    def statistics(self) -> TokenStatistics:
        logprobs = self.target - self.highest - self.exponentials.log()
        entropy = None if self.weighted is None else self.exponentials.log() - self.weighted / self.exponentials
        return TokenStatistics(logprobs, self.target >= self.highest, entropy)


def local_labels(
    labels: Int[Tensor, "*tokens"], local_vocabulary: int, group: dist.ProcessGroup
) -> tuple[Int[Tensor, "*tokens"], Bool[Tensor, "*tokens"]]:
    """Return each label's index in this rank's columns, and whether the rank holds the label. If it does not, the index
    has no meaning."""
    local = labels - group.rank() * local_vocabulary
    held = (local >= 0) & (local < local_vocabulary)
    return local.clamp(0, local_vocabulary - 1), held


def logits_at(
    logits: Float[Tensor, "*tokens local_vocabulary"], ids: Int[Tensor, "*tokens k"], group: dist.ProcessGroup
) -> Float[Tensor, "*tokens k"]:
    """Return the logits of the ids that this rank holds, and 0 for other ids. The sum over all ranks has all logits."""
    local, held = local_labels(ids, logits.shape[-1], group)
    return logits.gather(-1, local).where(held, 0.0)


def token_statistics(
    logits: Float[Tensor, "*tokens local_vocabulary"], labels: Int[Tensor, "*tokens"], group: dist.ProcessGroup
) -> TokenStatistics:
    """Return log-softmax and greedy matches at the labels, without gathering the vocabulary."""
    return VocabularySums.of_columns(logits.to(torch.float32, copy=True), labels, group).of_group(group).statistics()


def score_norms(logprobs: Float[Tensor, "*tokens"], sharpened: Float[Tensor, "*tokens"]) -> Float[Tensor, "*tokens"]:
    """Return the squared norm of the gradient of each token's log-probability by the logits, never below 0.

    The gradient is the one-hot vector of the token minus the probabilities, so that the squared norm is
    `1 - 2 pi + sum_v pi_v^2` (logit-gradient proxy, arXiv:2602.07078). At half the temperature, the token's
    log-probability is `2 log pi - log sum_v pi_v^2`, from which the sum follows.

    Args:
        logprobs: `log pi` of each token, in nats.
        sharpened: Log-probability of the same token at half the temperature.
    """
    return (1 - 2 * logprobs.exp() + (2 * logprobs - sharpened).exp()).clamp(min=0.0)


def vocabulary_entropy(
    logits: Float[Tensor, "rows columns local_vocabulary"], group: dist.ProcessGroup
) -> Float[Tensor, "rows columns"]:
    """Return the entropy of each row's softmax in nats, differentiable, without gathering the vocabulary.

    `H = log Z - sum_v p_v x_v`, with the logits `x` shifted by their maximum.
    """
    logits = logits.float()
    highest = logits.detach().amax(-1, keepdim=True)
    if group.size() > 1:
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    shifted = logits - highest
    exponentials = shifted.exp()
    # If a probability is 0, its product with any logit is 0 too.
    weighted = (exponentials * shifted).where(exponentials > 0, 0.0)
    sums = torch.stack([exponentials.sum(-1), weighted.sum(-1)])
    if group.size() > 1:
        # All ranks continue with the same sum, so the gradient passes to each rank's part unreduced.
        sums = reduce_from_tensor_model_parallel_region(sums)
    return sums[0].log() - sums[1] / sums[0]
