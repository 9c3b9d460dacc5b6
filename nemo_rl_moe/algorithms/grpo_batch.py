# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The batch of a step of GRPO: rewards, advantages and log-probabilities of its trajectories."""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from nemo_rl_moe.algorithms.advantages import (
    clip_advantages,
    compute_advantages,
    decoupled_advantages,
    shape_rewards,
)
from nemo_rl_moe.algorithms.losses.divergence import divergence_of_responses
from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.distributed.batch import TokenBatch, per_sequence, per_token
from nemo_rl_moe.metrics import PhaseClock
from nemo_rl_moe.models.interfaces import PolicyInterface
from nemo_rl_moe.moe.replay import ROUTED_EXPERTS
from nemo_rl_moe.rollouts.failed_responses import FailureRule, scored_responses
from nemo_rl_moe.rollouts.source import RolloutGroups, weights_of_each_reward
from nemo_rl_moe.rollouts.trajectory import (
    group_named_rewards,
    group_rewards,
    group_sampled_tokens,
    training_batch,
)


def shaped_rewards(config: GRPOMasterConfig, groups: RolloutGroups) -> Float[Tensor, "groups generations"]:
    """Rewards of the trained groups after the punishment of long responses."""
    num_generations = config.grpo.num_generations_per_prompt
    return shape_rewards(
        group_rewards(groups.trained, num_generations),
        group_sampled_tokens(groups.trained, num_generations),
        config.policy.generation.max_new_tokens,
        config.grpo.reward_shaping,
    )


def failure_rule(config: GRPOMasterConfig) -> FailureRule:
    """Return the treatment of responses that the environment failed to score."""
    return FailureRule.of(config.env.on_failure, config.grpo)


def advantages_of(
    config: GRPOMasterConfig, groups: RolloutGroups, rewards: Float[Tensor, "groups generations"]
) -> Float[Tensor, "groups generations"]:
    """Advantages that the estimator makes of one reward a response, held between the configuration's bounds."""
    failures, is_scored = failure_rule(config), scored_groups(groups)
    takes_part = failures.taking_part(is_scored)
    found = compute_advantages(failures.filled(rewards, is_scored), config.grpo.adv_estimator, takes_part)
    return failures.held_down(_within_bounds(config, found), is_scored)


def advantages_of_groups(config: GRPOMasterConfig, groups: RolloutGroups) -> Float[Tensor, "groups generations"]:
    """Advantages of the trained groups: of their shaped rewards or, by `gdpo`, of each named reward apart."""
    weights = weights_of_each_reward(config.grpo.adv_estimator, config.env.reward_weights)
    if not weights:
        return advantages_of(config, groups, shaped_rewards(config, groups))
    failures, is_scored = failure_rule(config), scored_groups(groups)
    named = group_named_rewards(groups.trained, groups.num_generations, weights)
    # Of a reward with a negative weight the highest is the worst.
    signs = torch.tensor([math.copysign(1.0, weight) for weight in weights.values()], dtype=named.dtype)
    filled = [sign * failures.filled(sign * rewards, is_scored) for sign, rewards in zip(signs, named, strict=True)]
    found = decoupled_advantages(
        torch.stack(filled), [*weights.values()], config.grpo.adv_estimator, failures.taking_part(is_scored)
    )
    return failures.held_down(_within_bounds(config, found), is_scored)


def scored_groups(groups: RolloutGroups) -> Bool[Tensor, "groups generations"]:
    """Return which trained responses have a score of the environment."""
    return scored_responses(groups.trained, groups.num_generations)


def _within_bounds(
    config: GRPOMasterConfig, advantages: Float[Tensor, "groups generations"]
) -> Float[Tensor, "groups generations"]:
    return clip_advantages(advantages, config.grpo.advantage_clip_low, config.grpo.advantage_clip_high)


def make_batch(config: GRPOMasterConfig, groups: RolloutGroups, pad_token_id: int) -> TokenBatch:
    """The trained groups with their advantages."""
    return training_batch(
        groups.trained,
        advantages_of_groups(config, groups),
        pad_token_id,
        leave_out_truncated=config.grpo.overlong_filtering,
        takes_part=failure_rule(config).taking_part(scored_groups(groups)),
    )


def take_divergence_from_rewards(
    config: GRPOMasterConfig, groups: RolloutGroups, batch: TokenBatch
) -> tuple[TokenBatch, dict[str, float]]:
    """Advantages from rewards less the weighted divergence of the responses, where `use_kl_in_reward` asks for it.

    Args:
        config: The whole configuration.
        groups: The trained groups.
        batch: Made of them, with the log-probabilities of the policy and of the reference model.

    Returns:
        The batch with these advantages, and the metric `kl_penalty`: the mean of the estimate over sampled tokens.
    """
    loss = config.loss_fn
    if not loss.use_kl_in_reward:
        return batch, {}
    logprobs, reference = (batch.columns[name].values for name in ("prev_logprobs", "reference_logprobs"))
    # Of all responses, those too that overlong filtering leaves out of the loss: others are compared with them.
    sampled = torch.zeros(logprobs.shape, dtype=torch.bool)
    for row, trajectory in enumerate(groups.trained):
        sampled[row, : len(trajectory.loss_mask)] = torch.as_tensor(trajectory.loss_mask)
    divergence = divergence_of_responses(logprobs, reference, sampled, loss)
    rewards = shaped_rewards(config, groups)
    rewards = rewards - loss.reference_policy_kl_penalty * divergence.view_as(rewards)
    advantages = advantages_of(config, groups, rewards)
    metrics = {"kl_penalty": float(divergence.sum() / sampled.sum().clamp(min=1))}
    return batch.with_columns(advantages=per_sequence(advantages.reshape(-1).float())), metrics


def add_logprobs(config: GRPOMasterConfig, policy: PolicyInterface, batch: TokenBatch, clock: PhaseClock) -> TokenBatch:
    """The batch with the log-probabilities that loss or rewards need: before the first update, of the reference."""
    without_tape = batch.without_stored(ROUTED_EXPERTS)
    if not ratio_is_one(config) or config.loss_fn.use_kl_in_reward:
        policy.prepare_for_logprobs(clock)
        with clock.phase("logprobs"):
            logprobs, batch = old_logprobs(config, policy, batch)
        batch = batch.with_columns(prev_logprobs=per_token(logprobs))
    if config.loss_fn.reference_policy_kl_penalty > 0:
        policy.prepare_for_logprobs(clock)
        with clock.phase("reference_logprobs"):
            batch = batch.with_columns(reference_logprobs=per_token(policy.reference_logprobs(without_tape)))
    return batch


def old_logprobs(
    config: GRPOMasterConfig, policy: PolicyInterface, batch: TokenBatch
) -> tuple[Float[Tensor, "batch sequence"], TokenBatch]:
    """Log-probabilities by the policy before the first update, and the batch with the tape that training replays."""
    replay = config.policy.megatron_cfg.routing_replay
    if replay == "rollout":
        # Under replay the old policy is that of the replayed experts too: otherwise no ratio would begin at 1.
        return policy.logprobs(batch), batch
    without_tape = batch.without_stored(ROUTED_EXPERTS)
    if replay == "none":
        return policy.logprobs(without_tape), batch
    logprobs, tape = policy.logprobs_and_routes(without_tape)
    return logprobs, without_tape if tape is None else without_tape.with_stored(ROUTED_EXPERTS, tape)


def ratio_is_one(config: GRPOMasterConfig) -> bool:
    """On-policy updates: the probability ratio is 1, so that no pass over the log-probabilities is needed.

    The responses of a step that is one update are trained on with the weights that made them.
    """
    return config.loss_fn.force_on_policy_ratio != "never" and config.updates_per_step == 1
