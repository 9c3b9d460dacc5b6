# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The section of distillation. The algorithm shares its loop and rollouts with GRPO."""

from typing import Literal

from nemo_rl_moe.config.megatron_moe_fields import MOE_FIELD_NAMES
from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.config.schema_base import Coefficient, PositiveInt, StrictModel, Text, WholeOrLess
from nemo_rl_moe.config.schema_grpo import RolloutMegatronConfig
from nemo_rl_moe.config.schema_policy import FrozenRoleConfig, MegatronConfig, PolicyConfig


class TeacherConfig(FrozenRoleConfig):
    """A model to learn from."""

    def as_policy(self, policy: PolicyConfig) -> PolicyConfig:
        """Return the teacher as a `policy` section. The teacher captures its routes if the policy captures or replays
        routes, but replays none."""
        role, of_policy = super().as_policy(policy), policy.megatron_cfg
        if not isinstance(of_policy, RolloutMegatronConfig):
            return role
        layout = role.megatron_cfg
        own = {name: getattr(layout, name) for name in MegatronConfig.model_fields if name not in MOE_FIELD_NAMES}
        of_rollouts = RolloutMegatronConfig.model_fields.keys() - MegatronConfig.model_fields.keys()
        routes = {name: getattr(of_policy, name) for name in of_rollouts}
        captures = of_policy.capture_routing or of_policy.routing_replay != "none"
        routes |= {"capture_routing": captures, "routing_replay": "none", "indexer_replay": "none"}
        return role.model_copy(update={"megatron_cfg": RolloutMegatronConfig.model_construct(**own, **routes)})


class DistillationConfig(StrictModel):
    """Teachers, the divergence of the policy from them, and the weights of the loss's components."""

    responses: Literal["policy", "given"]
    """Source of the responses to learn from. policy: the policy samples them (on-policy). given: the records contain
    them (off-policy)."""
    response_key: Text | None
    """Key of a record that holds its response. Needed with `responses: given`. null: the records hold no responses."""
    teachers: dict[str, TeacherConfig]
    """Name -> model to learn from. Each teacher is a role: `cluster.roles.NAME` assigns its machines."""
    teacher_by_environment: dict[str, str]
    """Environment of `env.mixture` -> name of its teacher. Responses of an environment without a teacher count in the
    policy gradient only. {}: there is one teacher, which scores all responses."""
    teacher_key: Text | None
    """Key of a record that holds the name of its teacher. A record without it has no teacher. null: no such key."""
    kl_type: Literal["forward", "reverse", "mixed", "jensen_shannon"]
    """Divergence from the teacher. forward: KL(teacher || policy). reverse: KL(policy || teacher). mixed: weighted mean
    of the two. jensen_shannon: mean of the divergences of teacher and policy from their mean distribution."""
    mixed_kl_weight: WholeOrLess
    """Weight of the forward divergence in `mixed`. The reverse divergence has the rest."""
    topk_logits_k: PositiveInt | None
    """Number of candidate tokens at each position. The divergence is exact for the candidates, and all other tokens
    count together as one more candidate. The size of the vocabulary makes all tokens candidates. null: estimate the
    divergence from the sampled token (with `kl_type: reverse` only)."""
    topk_ids: Literal["policy", "teacher"]
    """The model whose `topk_logits_k` most likely tokens are the candidates."""
    kl_weight: Coefficient
    """Weight of the divergence. The divergence is averaged over the tokens that have a teacher."""
    policy_gradient_weight: Coefficient
    """Weight of the policy gradient of `loss_fn` on the rewards. 0: rewards are logged and not trained on."""
    cross_entropy_weight: Coefficient
    """Weight of the negative log-likelihood of given responses, averaged over their tokens."""


class DistillationMasterConfig(GRPOMasterConfig):
    """The configuration of a distillation run: GRPO's sections, and teachers."""

    distillation: DistillationConfig
    """Teachers and the loss."""

    @property
    def given_response_key(self) -> str | None:
        return self.distillation.response_key
