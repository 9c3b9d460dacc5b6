# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The section that distillation has beside those of GRPO, whose loop and rollouts it shares."""

from typing import Literal

from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.config.schema_base import Coefficient, PositiveInt, StrictModel, WholeOrLess
from nemo_rl_moe.config.schema_policy import RoleModelConfig


class DistillationConfig(StrictModel):
    """Teachers, the divergence from them, and the weights of the components of the loss."""

    teachers: dict[str, RoleModelConfig]
    """Models to learn from, by name: each is a role, whose workers `cluster.roles` places under that name."""
    teacher_by_environment: dict[str, str]
    """Environment of `env.mixture` to the name of its teacher; one that is left out has none, and its responses count
    in the policy gradient alone. {}: the only teacher scores all responses."""
    kl_type: Literal["forward", "reverse", "mixed", "jensen_shannon"]
    """Divergence from the teacher: forward: KL(teacher || policy); reverse: KL(policy || teacher); mixed: their
    weighted mean; jensen_shannon: mean of the divergences of both from their mean distribution."""
    mixed_kl_weight: WholeOrLess
    """Weight of `forward` in `mixed`; that of `reverse` is the rest."""
    topk_logits_k: PositiveInt | None
    """Candidate tokens at each position, of which the divergence is exact; all others together count as one more. The
    size of the vocabulary: all tokens. null: `reverse` alone, estimated from the sampled token."""
    topk_ids: Literal["policy", "teacher"]
    """Whose likeliest tokens the candidates are."""
    kl_weight: Coefficient
    """Weight of the divergence, a mean over the tokens that have a teacher."""
    policy_gradient_weight: Coefficient
    """Weight of the policy gradient on the rewards, as `loss_fn` has it; 0: rewards are logged and not trained on."""


class DistillationMasterConfig(GRPOMasterConfig):
    """Everything that a run of distillation needs: what GRPO has, and teachers."""

    distillation: DistillationConfig
    """Teachers and the loss."""
