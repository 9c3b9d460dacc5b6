# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The section of distillation, which shares loop and rollouts with GRPO."""

from typing import Literal

from nemo_rl_moe.config.megatron_moe_fields import MOE_FIELD_NAMES
from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.config.schema_base import Coefficient, PositiveInt, StrictModel, Text, WholeOrLess
from nemo_rl_moe.config.schema_grpo import RolloutMegatronConfig
from nemo_rl_moe.config.schema_policy import MegatronConfig, PolicyConfig, RoleModelConfig


class TeacherConfig(RoleModelConfig):
    """A model to learn from."""

    def as_policy(self, policy: PolicyConfig) -> PolicyConfig:
        """Return the teacher as a `policy` section. It captures its routes if the policy does, and replays none."""
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
    """Responses to learn from. policy: sampled by the policy (on-policy). given: in the records (off-policy)."""
    response_key: Text | None
    """Key of a record that holds its response. Needed with `responses: given`. null: the records hold none."""
    teachers: dict[str, TeacherConfig]
    """Models to learn from, by name. Each is a role, and `cluster.roles` assigns machines to it under this name."""
    teacher_by_environment: dict[str, str]
    """Name of the teacher of each environment of `env.mixture`. Responses of an environment without a teacher count in
    the policy gradient only. {}: the only teacher scores all responses."""
    teacher_key: Text | None
    """Key of a record that holds the name of its teacher. A record without it has no teacher. null: no such key."""
    kl_type: Literal["forward", "reverse", "mixed", "jensen_shannon"]
    """Divergence from the teacher. forward: KL(teacher || policy). reverse: KL(policy || teacher). mixed: weighted mean
    of the two. jensen_shannon: mean of the divergences of teacher and policy from their mean distribution."""
    mixed_kl_weight: WholeOrLess
    """Weight of the forward divergence in `mixed`. The reverse divergence has the rest."""
    topk_logits_k: PositiveInt | None
    """Number of candidate tokens at each position, for which the divergence is exact. All others count together as one
    more. The size of the vocabulary: all tokens. null: estimate from the sampled token, with `reverse` only."""
    topk_ids: Literal["policy", "teacher"]
    """Model whose most likely tokens are the candidates."""
    kl_weight: Coefficient
    """Weight of the divergence, a mean over the tokens that have a teacher."""
    policy_gradient_weight: Coefficient
    """Weight of the policy gradient of `loss_fn` on the rewards. 0: rewards are logged and not trained on."""
    cross_entropy_weight: Coefficient
    """Weight of the negative log-likelihood of given responses, a mean over their tokens."""


class DistillationMasterConfig(GRPOMasterConfig):
    """The configuration of a distillation run: GRPO's sections, and teachers."""

    distillation: DistillationConfig
    """Teachers and the loss."""

    @property
    def given_response_key(self) -> str | None:
        return self.distillation.response_key
