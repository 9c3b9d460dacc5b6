# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Batch of a step of GRPO: rewards, advantages and log-probabilities of its trajectories."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from nemo_rl_moe.algorithms.advantages import clip_advantages, compute_advantages, shape_rewards
from nemo_rl_moe.algorithms.custom_estimator import find_estimator
from nemo_rl_moe.algorithms.losses.custom_objective import find_objective
from nemo_rl_moe.algorithms.losses.divergence import divergence_of_responses
from nemo_rl_moe.algorithms.losses.policy_gradient import SELECTED_TOKENS, PolicyGradientLoss
from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.distributed.batch import Axis, TokenBatch, per_token
from nemo_rl_moe.metrics import PhaseClock
from nemo_rl_moe.models.kept_tokens import KEPT_TOKENS
from nemo_rl_moe.rl.estimators.interface import EstimatorInputs
from nemo_rl_moe.rollouts.dispatch.dispatcher import DynamicSampling
from nemo_rl_moe.rollouts.failed_responses import FailureRule
from nemo_rl_moe.rollouts.source import RolloutGroups
from nemo_rl_moe.rollouts.training_batch import (
    advantage_column,
    loss_masks,
    sampled_tokens,
    token_lags,
    tokens_of_trajectories,
    training_batch,
    turns_of_tokens,
)
from nemo_rl_moe.rollouts.trajectory import (
    Trajectory,
    group_longest_responses,
    group_named_rewards,
    group_rewards,
    group_sampled_tokens,
    group_turn_rewards,
    trajectory_of_each_sequence,
)
from nemo_rl_moe.routing.indexer_replay import INDEXER_POSITIONS
from nemo_rl_moe.routing.replay import ROUTED_EXPERTS
from nemo_rl_moe.token_lag import NO_LAG, TOKEN_LAG

if TYPE_CHECKING:
    from nemo_rl_moe.models.policy.lm_policy import MegatronPolicy

SELECTED_FRACTION = "selected_token_fraction"
"""Metric of an objective that selects tokens."""
SCORE_NORMS = "score_norms"
"""Column of the squared norms that some estimators read. It leaves the batch with the last advantages."""


def shaped_rewards(config: GRPOMasterConfig, groups: RolloutGroups) -> Float[Tensor, "groups generations"]:
    """Return the rewards of the trained groups, minus a length penalty for each trajectory's longest response."""
    num_generations = config.grpo.num_generations_per_prompt
    return shape_rewards(
        group_rewards(groups.trained, num_generations),
        group_longest_responses(groups.trained, num_generations),
        config.policy.generation.max_new_tokens,
        config.grpo.reward_shaping,
    )


def failure_rule(config: GRPOMasterConfig) -> FailureRule:
    """Return the treatment of responses that the environment failed to score.

    If the estimator compares responses of a group or of the step, a response is trained on only if there is another
    response to compare it with.
    """
    baseline = find_estimator(config.grpo.adv_estimator.name).baseline
    compares_groups = baseline == "group" and config.grpo.num_generations_per_prompt > 1
    on_failure = {name: each.on_failure for name, each in config.env.environments.items()}
    unscored = frozenset(name for name, each in config.env.environments.items() if not each.score_truncated)
    return FailureRule(on_failure, 2 if compares_groups else 1, 1 if baseline == "none" else 2, unscored)


def dynamic_sampling(config: GRPOMasterConfig) -> DynamicSampling | None:
    """Return the rule by which groups without a signal for the estimator are replaced. None if it is not configured."""
    if not config.grpo.use_dynamic_sampling:
        return None
    return DynamicSampling(lambda group: bool(informative_groups(config, group).all()), config.grpo.most_groups)


def informative_groups(config: GRPOMasterConfig, trajectories: Sequence[Trajectory]) -> Bool[Tensor, " groups"]:
    """Return which groups the estimator can learn from, by the environment's unshaped rewards."""
    rewards = group_rewards(trajectories, config.grpo.num_generations_per_prompt)
    return find_estimator(config.grpo.adv_estimator.name).is_informative(
        estimator_inputs(config, trajectories, rewards)
    )


def trained_responses(config: GRPOMasterConfig, groups: RolloutGroups) -> Bool[Tensor, "groups generations"]:
    """Return which responses are trained on.

    Without `zero_variance_filtering`, these are the responses that take part in the comparison. With it, groups without
    a signal for the estimator are not trained on.
    """
    takes_part = failure_rule(config).taking_part(groups.trained, groups.num_generations)
    if not config.grpo.zero_variance_filtering:
        return takes_part
    return takes_part & informative_groups(config, groups.trained)[:, None]


def estimator_inputs(
    config: GRPOMasterConfig,
    trajectories: Sequence[Trajectory],
    rewards: Float[Tensor, "groups generations"],
    score_norms: Float[Tensor, "sequences tokens"] | None = None,
) -> EstimatorInputs:
    """Return the estimator's inputs, made of trajectories (group after group) and of the given rewards."""
    size = config.grpo.num_generations_per_prompt
    failures = failure_rule(config)
    weights = config.named_reward_weights
    mask, turns = loss_masks(trajectories), turns_of_tokens(trajectories)
    shape = (-1, size, mask.shape[1])
    return EstimatorInputs(
        rewards=failures.filled(rewards, trajectories),
        takes_part=failures.taking_part(trajectories, size),
        config=config.grpo.adv_estimator,
        named_rewards=_named_rewards(trajectories, weights, failures, size),
        reward_weights=weights,
        group_ids=tuple(trajectory.group_id for trajectory in trajectories[::size]),
        num_tokens=group_sampled_tokens(trajectories, size),
        token_mask=mask.view(shape),
        token_turns=turns.view(shape),
        turn_rewards=group_turn_rewards(trajectories, size),
        score_norms=None if score_norms is None else tokens_of_trajectories(score_norms, trajectories).view(shape),
    )


def _named_rewards(
    trajectories: Sequence[Trajectory],
    weights: Mapping[str, float],
    failures: FailureRule,
    num_generations: int,
) -> dict[str, Float[Tensor, "groups generations"]]:
    if not weights:
        return {}
    named = group_named_rewards(trajectories, num_generations, weights)
    # With a negative weight, the highest reward is the worst.
    signs = [math.copysign(1.0, weight) for weight in weights.values()]
    filled = [sign * failures.filled(sign * rewards, trajectories) for sign, rewards in zip(signs, named, strict=True)]
    return dict(zip(weights, filled, strict=True))


def advantages_of(
    config: GRPOMasterConfig,
    groups: RolloutGroups,
    rewards: Float[Tensor, "groups generations"],
    score_norms: Float[Tensor, "sequences tokens"] | None = None,
) -> Float[Tensor, "groups generations ..."]:
    """Return the advantages from these rewards, within the configured bounds."""
    estimator = find_estimator(config.grpo.adv_estimator.name)
    advantages = compute_advantages(estimator, estimator_inputs(config, groups.trained, rewards, score_norms))
    bounded = clip_advantages(advantages, config.grpo.advantage_clip_low, config.grpo.advantage_clip_high)
    return failure_rule(config).held_down(bounded, groups.trained)


def advantages_of_groups(config: GRPOMasterConfig, groups: RolloutGroups) -> Float[Tensor, "groups generations ..."]:
    """Return the advantages of the trained groups from their shaped rewards."""
    return advantages_of(config, groups, shaped_rewards(config, groups))


def make_batch(config: GRPOMasterConfig, groups: RolloutGroups, pad_token_id: int, weight_version: int) -> TokenBatch:
    """Return the trained groups with their advantages and, if older weights sampled any token, the tokens' lags.

    The lag of a token is the number of optimizer steps since it was sampled.

    Args:
        weight_version: Number of optimizer steps that the trained weights have taken.
    """
    batch = training_batch(
        groups.trained,
        advantages_of_groups(config, groups),
        pad_token_id,
        leave_out_truncated=config.grpo.overlong_filtering,
        takes_part=trained_responses(config, groups),
    )
    if config.loss_fn.sampling_mask == "replay" and KEPT_TOKENS not in batch.stored:
        raise RuntimeError("loss_fn.sampling_mask: replay: the engine has returned no sampling masks")
    lags = token_lags(groups.trained, weight_version)
    return batch.with_columns(**{TOKEN_LAG: per_token(lags, fill=NO_LAG)}) if bool((lags > 0).any()) else batch


def with_last_advantages(
    config: GRPOMasterConfig, groups: RolloutGroups, batch: TokenBatch
) -> tuple[TokenBatch, dict[str, float]]:
    """Return the batch with the advantages that need the results of passes, if there are any.

    With `use_kl_in_reward`, they are from rewards minus the weighted divergence. Some estimators read score norms.

    Args:
        batch: Batch of the groups, with the results of `add_logprobs`.

    Returns:
        The batch with these advantages, and with `use_kl_in_reward` the metric `kl_penalty`: the mean estimate of the
        divergence over sampled tokens.
    """
    norms = batch.columns.get(SCORE_NORMS)
    if norms is None and not config.loss_fn.use_kl_in_reward:
        return batch, {}
    rewards, metrics = shaped_rewards(config, groups), dict[str, float]()
    if config.loss_fn.use_kl_in_reward:
        divergence, metrics = _divergence_of_trajectories(config, groups, batch)
        rewards = rewards - config.loss_fn.reference_policy_kl_penalty * divergence.view_as(rewards)
    advantages = advantages_of(config, groups, rewards, None if norms is None else norms.values)
    columns = {name: column for name, column in batch.columns.items() if name != SCORE_NORMS}
    return replace(batch, columns=columns | {"advantages": advantage_column(advantages, groups.trained)}), metrics


def _divergence_of_trajectories(
    config: GRPOMasterConfig, groups: RolloutGroups, batch: TokenBatch
) -> tuple[Float[Tensor, " trajectories"], dict[str, float]]:
    """Return the divergence of each trajectory's sampled tokens in nats, and the metric `kl_penalty`."""
    logprobs, reference = (batch.columns[name].values for name in ("prev_logprobs", "reference_logprobs"))
    # For all responses and sequences, even if overlong filtering drops them from the loss, since other responses are
    # compared with them.
    sampled = sampled_tokens(groups.trained)
    of_sequences = divergence_of_responses(logprobs, reference, sampled, config.loss_fn)
    owners = torch.tensor(trajectory_of_each_sequence(groups.trained))
    divergence = of_sequences.new_zeros(len(groups.trained)).index_add_(0, owners, of_sequences)
    return divergence, {"kl_penalty": float(divergence.sum() / sampled.sum().clamp(min=1))}


def with_selected_tokens(config: GRPOMasterConfig, batch: TokenBatch, step: int) -> tuple[TokenBatch, dict[str, float]]:
    """Return the batch with the tokens that the objective selects, if it does.

    The selection is by the log-probabilities before the step, which the driver has of all tokens of the step. A random
    selection depends only on `grpo.seed` and the step.

    Returns:
        The batch with the column `selected_tokens`, and the metric `selected_token_fraction`: their share of the
        trained tokens.
    """
    select = find_objective(config.loss_fn.objective).select
    if select is None:
        return batch, {}
    mask, logprobs = batch.token_mask, batch.columns["prev_logprobs"].values
    column = batch.columns["advantages"]
    advantages = column.values if column.axis is Axis.TOKEN else column.values[:, None].expand_as(logprobs)
    seed = int(np.random.SeedSequence([config.grpo.seed, step]).generate_state(1)[0])
    generator = torch.Generator().manual_seed(seed)
    selected = select(logprobs, advantages, mask, config.loss_fn, generator) if mask.any() else mask
    fraction = float(selected.sum() / mask.sum().clamp(min=1))
    return batch.with_columns(**{SELECTED_TOKENS: per_token(selected)}), {SELECTED_FRACTION: fraction}


def add_logprobs(
    config: GRPOMasterConfig,
    policy: "MegatronPolicy",
    batch: TokenBatch,
    clock: PhaseClock,
) -> TokenBatch:
    """Return the batch with the log-probabilities that the loss or rewards need."""
    without_capture = batch.without_stored(ROUTED_EXPERTS)
    if find_estimator(config.grpo.adv_estimator.name).needs_score_norms:
        replays = config.policy.megatron_cfg.routing_replay == "rollout"
        policy.prepare_for_logprobs(clock)
        with clock.phase("score_norms"):
            norms = policy.score_norms(batch if replays else without_capture)
        batch = batch.with_columns(**{SCORE_NORMS: per_token(norms)})
    selects = find_objective(config.loss_fn.objective).select is not None
    if not prev_is_current(config) or config.loss_fn.use_kl_in_reward or selects:
        policy.prepare_for_logprobs(clock)
        with clock.phase("logprobs"):
            logprobs, batch = old_logprobs(config, policy, batch)
        batch = batch.with_columns(prev_logprobs=per_token(logprobs))
    if config.loss_fn.reference_policy_kl_penalty > 0:
        policy.prepare_for_logprobs(clock)
        with clock.phase("reference_logprobs"):
            asked = without_capture.without_stored(INDEXER_POSITIONS)  # the reference chooses for itself
            batch = batch.with_columns(reference_logprobs=per_token(policy.reference_logprobs(asked)))
    return batch


def old_logprobs(
    config: GRPOMasterConfig, policy: "MegatronPolicy", batch: TokenBatch
) -> tuple[Float[Tensor, "batch sequence"], TokenBatch]:
    """Return the log-probabilities before the first update, and the batch with the routes to replay, if any."""
    replay = config.policy.megatron_cfg.routing_replay
    if replay == "rollout":
        # Under replay, the old policy also takes the replayed experts. Otherwise no ratio would begin at 1.
        return policy.logprobs(batch), batch
    without_capture = batch.without_stored(ROUTED_EXPERTS)
    if replay == "none":
        return policy.logprobs(without_capture), batch
    logprobs, capture = policy.logprobs_and_routes(without_capture)
    return logprobs, without_capture if capture is None else without_capture.with_stored(ROUTED_EXPERTS, capture)


def prev_is_current(config: GRPOMasterConfig) -> bool:
    """Return whether the training pass gives the log-probabilities before the update, so that no other pass is needed.

    This is so if a step has only one update, even if older weights sampled the tokens.
    """
    return config.updates_per_step == 1 and config.loss_fn.force_on_policy_ratio != "never"


def make_loss(config: GRPOMasterConfig, *, is_on_policy: bool) -> PolicyGradientLoss:
    """Return the loss of a step.

    If older weights sampled tokens and no importance-sampling correction is configured, the probability ratio in the
    objective is relative to the engine's log-probabilities.

    Args:
        is_on_policy: Whether the trained weights sampled every token of the step.
    """
    is_uncorrected = not is_on_policy and config.loss_fn.importance_sampling_correction == "none"
    return PolicyGradientLoss(
        config.loss_fn, prev_is_current=prev_is_current(config), ratio_to_generation=is_uncorrected
    )
