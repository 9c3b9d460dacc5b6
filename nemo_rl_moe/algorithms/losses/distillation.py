# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Loss of distillation: divergence from a teacher, policy gradient and cross-entropy, each with a separate denominator.

Each component is a mean over the tokens to which it applies, so other tokens in the batch do not change it. For
example, responses without a teacher do not dilute the divergence.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from nemo_rl_moe.algorithms.losses.policy_gradient import PolicyGradientLoss
from nemo_rl_moe.algorithms.losses.policy_metrics import Metrics
from nemo_rl_moe.algorithms.losses.ratios import importance_ratio, importance_ratios
from nemo_rl_moe.algorithms.losses.teacher_divergence import KlType, candidate_divergence, sampled_divergence
from nemo_rl_moe.distributed.batch import Column, per_sequence, per_token
from nemo_rl_moe.metrics import Reduction
from nemo_rl_moe.models.interfaces import Head, LossInputs, LossOutputs
from nemo_rl_moe.rl.corrections import CORRECTIONS

TEACHER_LOGPROBS = "teacher_logprobs"
"""Column: log-probability of each token, `[batch, sequence]`, or of its candidates, `[batch, sequence, k]`."""
TEACHER_SHARE = "teacher_share"
"""Column per token: 0 without a teacher, otherwise 1 / number of tokens with a teacher in the global batch."""
TEACHER_PART = "teacher_part"
"""Column per sequence: number of tokens with a teacher in its global batch, divided by their number in the step."""


@dataclass(frozen=True)
class DistillationLoss:
    """Weighted sum of three means over the global batch. Components with weight 0 are omitted.

    - divergence: mean of `candidate_divergence` or, without candidates, of `sampled_divergence`, over the tokens that
      have a teacher
    - policy gradient: mean as in `policy_gradient`
    - cross-entropy: mean of the negative log-likelihood over the trained tokens

    Columns of the batch: `teacher_logprobs`, `teacher_share`, `teacher_part`, the columns of the policy gradient, and
    `generation_logprobs` for a divergence without candidates.

    Metrics are these means before weighting, in nats: `teacher_kl` (estimated from sampled tokens without candidates),
    `cross_entropy`, `policy_candidate_mass` and `teacher_candidate_mass` (a model's probability of all candidates
    together), and the metrics of the policy gradient. Metrics that need a teacher are means over all tokens of the step
    with a teacher, in all of the step's global batches.

    Attributes:
        has_candidates: Whether the teacher gives the log-probabilities of `k` candidate tokens at each position.
            Otherwise it gives only that of the sampled token.
        policy_gradient: Loss of the rewards, if there are rewards. Its metrics are computed even with weight 0.
    """

    kl_type: KlType
    mixed_kl_weight: float
    has_candidates: bool
    kl_weight: float
    policy_gradient_weight: float
    cross_entropy_weight: float
    policy_gradient: PolicyGradientLoss | None

    @property
    def needs(self) -> frozenset[Head]:
        own = frozenset({Head.CANDIDATES} if self.has_candidates else ())
        return own if self.policy_gradient is None else own | self.policy_gradient.needs

    @property
    def reduction(self) -> Reduction:
        """How the loss is averaged: like the policy gradient or, without a policy gradient, over trained tokens."""
        return Reduction.SHARE if self.policy_gradient is None else self.policy_gradient.reduction

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        divergence, metrics = self._divergence(inputs)
        loss = self.kl_weight * divergence
        if self.policy_gradient is not None:
            of_rewards = self.policy_gradient(inputs)
            metrics |= of_rewards.metrics
            if self.policy_gradient_weight > 0:
                loss = loss + self.policy_gradient_weight * of_rewards.loss
        else:
            metrics["num_valid_tokens"] = (inputs.token_mask.sum(), Reduction.SUM)
            likelihood = inputs.logprobs.where(inputs.token_mask, 0.0).sum() / max(inputs.global_valid_tokens, 1)
            metrics["cross_entropy"] = (-likelihood.detach(), Reduction.SHARE)
            if self.cross_entropy_weight > 0:
                loss = loss - self.cross_entropy_weight * likelihood
        return LossOutputs(loss, metrics)

    def _divergence(self, inputs: LossInputs) -> tuple[Float[Tensor, ""], Metrics]:
        share, part = inputs.per_target(TEACHER_SHARE), inputs.per_target(TEACHER_PART)
        counts = share > 0
        teacher = inputs.per_target(TEACHER_LOGPROBS)

        def mean(values: Tensor) -> Float[Tensor, ""]:
            return (share * values.where(counts, 0.0)).sum()

        def mean_of_step(values: Tensor) -> tuple[Float[Tensor, ""], Reduction]:
            return mean(part * values.detach()), Reduction.SUM

        if not self.has_candidates:
            # Before arithmetic: masked entries may hold anything, and NaN times 0 is NaN in the gradient too.
            policy, teacher, sampled = (
                each.where(counts, 0.0)
                for each in (inputs.logprobs, teacher, inputs.per_target("generation_logprobs").to(teacher))
            )
            each, unbiased = sampled_divergence(policy, teacher, self._weights(policy.detach(), sampled, counts))
            return mean(each), {"teacher_kl": mean_of_step(unbiased)}
        assert inputs.candidates is not None  # see `needs`
        any_token = torch.full_like(teacher, -1.0 - float(teacher.shape[-1]))
        policy = inputs.candidates.where(counts[..., None], any_token)
        teacher = teacher.where(counts[..., None], any_token)
        divergence = candidate_divergence(policy, teacher, self.kl_type, self.mixed_kl_weight)
        metrics: Metrics = {"teacher_kl": mean_of_step(divergence)}
        for name, each in (("policy", policy), ("teacher", teacher)):
            metrics[f"{name}_candidate_mass"] = mean_of_step(each.detach().exp().sum(-1))
        return mean(divergence), metrics

    def _weights(
        self,
        policy: Float[Tensor, "sequences targets"],
        sampled: Float[Tensor, "sequences targets"],
        mask: Bool[Tensor, "sequences targets"],
    ) -> Float[Tensor, "sequences targets"]:
        """Return the weight of each sampled token: the policy's probability over the sampling probability."""
        # The policy gradient's correction bounds the weights. Without a correction they are unbounded.
        config = None if self.policy_gradient is None else self.policy_gradient.config
        if config is None or (correction := CORRECTIONS[config.importance_sampling_correction]).effect is None:
            return importance_ratio(policy, sampled)
        return correction.weights(*importance_ratios(policy, sampled, mask, config), config)


def shares_of_means(counts: Bool[Tensor, "batch sequence"], first_rows: list[int]) -> dict[str, Column]:
    """Return the columns `teacher_share` and `teacher_part` of a step, which weight its tokens in means over a teacher.

    `teacher_share` is 1 / (number of tokens with a teacher in the global batch) at such tokens, else 0. `teacher_part`
    is the global batch's share of the step's tokens with a teacher.

    Args:
        counts: Mask of the tokens with a teacher. The first token of a sequence never counts, as nothing predicts it.
        first_rows: Row of the first sequence of each global batch.
    """
    counts = counts.clone()
    counts[:, 0] = False
    shares, parts = torch.zeros(counts.shape), torch.zeros(len(counts))
    for start, end in zip(first_rows, [*first_rows[1:], len(counts)], strict=True):
        number = counts[start:end].sum()
        shares[start:end] = counts[start:end] / number.clamp(min=1)
        parts[start:end] = number / counts.sum().clamp(min=1)
    return {TEACHER_SHARE: per_token(shares), TEACHER_PART: per_sequence(parts)}
