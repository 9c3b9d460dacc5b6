# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The section that distillation has beside those of GRPO, whose loop and rollouts it shares."""

from typing import Literal

from nemo_rl_moe.config.megatron_moe_fields import MOE_FIELD_NAMES
from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.config.schema_base import Coefficient, PositiveInt, StrictModel, Text, WholeOrLess
from nemo_rl_moe.config.schema_grpo import RolloutMegatronConfig
from nemo_rl_moe.config.schema_policy import MegatronConfig, PolicyConfig, RoleModelConfig


class TeacherConfig(RoleModelConfig):
    """A model to learn from."""

    def as_policy(self, policy: PolicyConfig) -> PolicyConfig:
        """Return the teacher as a `policy` section; it captures its routes where the policy does, and replays none."""
        role, of_policy = super().as_policy(policy), policy.megatron_cfg
        if not isinstance(of_policy, RolloutMegatronConfig):
            return role
        layout = role.megatron_cfg
        own = {name: getattr(layout, name) for name in MegatronConfig.model_fields if name not in MOE_FIELD_NAMES}
        of_rollouts = RolloutMegatronConfig.model_fields.keys() - MegatronConfig.model_fields.keys()
        routes = {name: getattr(of_policy, name) for name in of_rollouts}
        captures = of_policy.capture_routing or of_policy.routing_replay != "none"
        routes |= {"capture_routing": captures, "routing_replay": "none"}
        return role.model_copy(update={"megatron_cfg": RolloutMegatronConfig.model_construct(**own, **routes)})


class DistillationConfig(StrictModel):
    """Teachers, the divergence from them, and the weights of the components of the loss."""

    responses: Literal["policy", "given"]
    """Responses that are learned from: policy: those that it samples (on-policy); given: those of the records
    (off-policy)."""
    response_key: Text | None
    """Key of a record that holds its response, with `given`; null: none."""
    teachers: dict[str, TeacherConfig]
    """Models to learn from, by name: each is a role, whose workers `cluster.roles` places under that name."""
    teacher_by_environment: dict[str, str]
    """Environment of `env.mixture` to the name of its teacher; one that is left out has none, and its responses count
    in the policy gradient alone. {}: the only teacher scores all responses."""
    teacher_key: Text | None
    """Key of a record that holds the name of its teacher; a record without it has none. null: records do not say it."""
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
    cross_entropy_weight: Coefficient
    """Weight of the negative log-likelihood of given responses, a mean over their tokens."""


class DistillationMasterConfig(GRPOMasterConfig):
    """Everything that a run of distillation needs: what GRPO has, and teachers."""

    distillation: DistillationConfig
    """Teachers and the loss."""

    @property
    def given_response_key(self) -> str | None:
        return self.distillation.response_key
