# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities, greedy matches and entropies from logits that are cut along the vocabulary."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from torch import Tensor

LOWEST_LOG_PROBABILITY = -1000.0
"""Its exponential is 0 in float64 too: beyond, as with logits of minus infinity, `p log p` would be no number."""


class TokenStatistics(NamedTuple):
    """Statistics of each target token: its log-probability in nats, whether it ranks first; where they are asked for,
    the entropy, the value of the state in which it is chosen, and the log-probabilities of its candidates."""

    logprobs: Float[Tensor, "*tokens"]
    greedy_matches: Bool[Tensor, "*tokens"] | None
    entropy: Float[Tensor, "*tokens"] | None = None
    values: Float[Tensor, "*tokens"] | None = None
    candidates: Float[Tensor, "*tokens k"] | None = None

    @staticmethod
    def of_values(values: Float[Tensor, "*tokens"]) -> "TokenStatistics":
        """Return the statistics of a pass that computes values alone: its log-probabilities are zeros."""
        return TokenStatistics(torch.zeros_like(values), None, None, values)

    def over_kept(self, kept_tokens: Int[Tensor, "*tokens k"]) -> "TokenStatistics":
        """Return log-probabilities over the kept tokens, which are the candidates here.

        `log p(y) - log sum_{v in K} p(v)`, which is the log-softmax with all logits outside of `K` masked ("keep
        sampling mask", DeepSeek-V3.2, arXiv:2512.02556, section 3.1). Where none is kept, nothing changes. The entropy
        stays that of the whole vocabulary.
        """
        assert self.candidates is not None
        is_kept, is_cut = kept_tokens >= 0, kept_tokens[..., 0] >= 0
        log_mass = self.candidates.masked_fill(~is_kept & is_cut[..., None], -torch.inf).logsumexp(-1)
        return self._replace(logprobs=self.logprobs - log_mass.where(is_cut, 0.0), candidates=None)


class VocabularySums(NamedTuple):
    """Sums over the columns of the vocabulary that a rank holds, or over all of them, for each token."""

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
        """Return the sums over this rank's columns of the vocabulary; the logits are used up."""
        target = logits_at(logits, labels[..., None], group)[..., 0]
        highest = logits.amax(-1)
        shifted = logits.sub_(highest[..., None])
        if not with_entropy:
            return VocabularySums(highest, shifted.exp_().sum(-1), None, target)
        exponentials = shifted.clamp_(min=LOWEST_LOG_PROBABILITY).exp()
        return VocabularySums(highest, exponentials.sum(-1), exponentials.mul_(shifted).sum(-1), target)

    @staticmethod
    def joined(pieces: Sequence["VocabularySums"]) -> "VocabularySums":
        """Return the sums of all tokens out of those of consecutive pieces."""
        highest, exponentials, weighted, target = zip(*pieces, strict=True)
        return VocabularySums(
            torch.cat(highest),
            torch.cat(exponentials),
            None if weighted[0] is None else torch.cat(weighted),
            torch.cat(target),
        )

    def of_group(self, group: dist.ProcessGroup) -> "VocabularySums":
        """Reduce to sums over the whole vocabulary: two collectives, however many tokens."""
        if group.size() == 1:
            return self
        highest = self.highest.clone()
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        lower = self.highest - highest
        scale = lower.exp()
        sums = [self.target, self.exponentials * scale]
        if self.weighted is not None:
            # `exp(x - m) (x - m)` with the higher maximum `m`: both factors shift.
            lower = lower.clamp(min=LOWEST_LOG_PROBABILITY)
            sums.append(scale * (self.weighted + lower * self.exponentials))
        target, exponentials, *weighted = _summed(sums, group)
        return VocabularySums(highest, exponentials, weighted[0] if weighted else None, target)

    def statistics(self) -> TokenStatistics:
        logprobs = self.target - self.highest - self.exponentials.log()
        entropy = None if self.weighted is None else self.exponentials.log() - self.weighted / self.exponentials
        return TokenStatistics(logprobs, self.target >= self.highest, entropy)


def local_labels(
    labels: Int[Tensor, "*tokens"], local_vocabulary: int, group: dist.ProcessGroup
) -> tuple[Int[Tensor, "*tokens"], Bool[Tensor, "*tokens"]]:
    """Return the labels as columns of this rank, and which of them are; of others the column is any."""
    local = labels - group.rank() * local_vocabulary
    held = (local >= 0) & (local < local_vocabulary)
    return local.clamp(0, local_vocabulary - 1), held


def logits_at(
    logits: Float[Tensor, "*tokens local_vocabulary"], ids: Int[Tensor, "*tokens k"], group: dist.ProcessGroup
) -> Float[Tensor, "*tokens k"]:
    """Return the logits of ids that this rank holds, and 0 at the others: ranks' add up."""
    local, held = local_labels(ids, logits.shape[-1], group)
    return logits.gather(-1, local).where(held, 0.0)


def token_statistics(
    logits: Float[Tensor, "*tokens local_vocabulary"], labels: Int[Tensor, "*tokens"], group: dist.ProcessGroup
) -> TokenStatistics:
    """Return the log-softmax at the labels, without gathering the vocabulary."""
    return VocabularySums.of_columns(logits.to(torch.float32, copy=True), labels, group).of_group(group).statistics()


def _summed(values: Sequence[Tensor], group: dist.ProcessGroup) -> Tensor:
    stacked = torch.stack(list(values))
    dist.all_reduce(stacked, group=group)
    return stacked


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
    # Where a probability is 0 its product with the logit is 0 too, whatever that is.
    weighted = (exponentials * shifted).where(exponentials > 0, 0.0)
    sums = _sum_over_vocabulary(torch.stack([exponentials.sum(-1), weighted.sum(-1)]), group)
    return sums[0].log() - sums[1] / sums[0]


def _sum_over_vocabulary(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum over the group; each rank's gradient is its own part's, as all go on with the same sum."""
    if group.size() == 1:
        return values
    return reduce_from_tensor_model_parallel_region(values)
