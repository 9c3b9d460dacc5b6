# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Group relative policy optimization (DeepSeekMath, https://arxiv.org/abs/2402.03300), synchronous."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from nemo_rl_moe.algorithms.advantages import (
    clip_advantages,
    compute_advantages,
    decoupled_advantages,
    shape_rewards,
)
from nemo_rl_moe.algorithms.grpo_metrics import Validator, advantage_metrics, group_metrics
from nemo_rl_moe.algorithms.losses.divergence import divergence_of_responses
from nemo_rl_moe.algorithms.losses.policy_gradient import PolicyGradientLoss
from nemo_rl_moe.algorithms.run_observers import RunObserver, joined
from nemo_rl_moe.algorithms.step_metrics import training_metrics
from nemo_rl_moe.algorithms.step_recorder import (
    RunSummary,
    StepOutcome,
    StepRecorder,
    num_training_steps,
    validation_is_due,
)
from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.distributed.batch import TokenBatch, per_sequence, per_token
from nemo_rl_moe.generation.interface import GenerationEngine
from nemo_rl_moe.generation.refit import refit
from nemo_rl_moe.metrics import PhaseClock
from nemo_rl_moe.models.interfaces import PolicyInterface
from nemo_rl_moe.moe.replay import ROUTED_EXPERTS
from nemo_rl_moe.rollouts.failed_responses import FailureRule, scored_responses
from nemo_rl_moe.rollouts.limits import RolloutsGivenUpError
from nemo_rl_moe.rollouts.source import RolloutGroups, RolloutSource, weights_of_each_reward
from nemo_rl_moe.rollouts.trajectory import (
    Trajectory,
    group_named_rewards,
    group_rewards,
    group_sampled_tokens,
    training_batch,
)
from nemo_rl_moe.run_folder.failures import failures_of


@dataclass(frozen=True)
class Rollouts:
    """Parts of a run that make its trajectories.

    Attributes:
        engine: Generates; gets the policy's weights before it does.
        source: Gives the trajectories to train on.
        validate: Validates the policy on held-out prompts; None without any.
        pad_token_id: Fills a batch behind the end of each sequence.
    """

    engine: GenerationEngine
    source: RolloutSource
    validate: Validator | None
    pad_token_id: int


def train_grpo(
    config: GRPOMasterConfig,
    policy: PolicyInterface,
    rollouts: Rollouts,
    recorder: StepRecorder,
    observers: Sequence[RunObserver] = (),
) -> RunSummary:
    """Train from where the run stands to its last step, validate when due, and end each step with the recorder.

    Args:
        config: The whole configuration.
        policy: Policy to train.
        rollouts: Make the trajectories.
        recorder: Records each step, saves, and says when to stop.
        observers: See each step, in this order.
    """
    engine, source, validate = rollouts.engine, rollouts.source, rollouts.validate
    last_step = num_training_steps(config.grpo, source.steps_per_epoch)
    loss_function = PolicyGradientLoss(config.loss_fn, on_policy=ratio_is_one(config))
    source.load_state_dict({"batches_taken": recorder.state.batches_taken})
    step = recorder.state.step
    goes_on = step < last_step and not source.is_used_up

    update_engine(engine, policy, PhaseClock(), observers)
    if recorder.is_fresh and validate is not None and config.grpo.val_at_start:
        goes_on &= record_first_validation(validate, recorder)
    while goes_on:
        clock = PhaseClock()
        with clock.phase("step"):
            try:
                groups = source.next(step, clock)
            except RolloutsGivenUpError:
                recorder.give_up_step()
                break
            step += 1
            if source.is_used_up:  # dynamic sampling may come to their end before the last step
                last_step = step
            batch = make_batch(config, groups, rollouts.pad_token_id)
            observed = joined(each.before_update(step, batch, groups.trained, clock) for each in observers)
            batch = add_logprobs(config, policy, batch, clock)
            batch, divergence = take_divergence_from_rewards(config, groups, batch)
            policy.prepare_for_training(clock)
            with clock.phase("train"):
                result = policy.train(batch, loss_function)
            clock.count_tokens("train", result.num_tokens)
            recorder.record_artifacts(result.artifacts)
            observed |= joined(each.after_update(result, clock) for each in observers)
            observed |= update_engine(engine, policy, clock, observers)
        due = validate if validation_is_due(config.grpo, step, last_step) else None
        validation, responses = ({}, {}) if due is None else validated(due)
        outcome = StepOutcome(
            batches_taken=source.state_dict()["batches_taken"],
            result=result,
            training=training_metrics(result, metrics_of_groups(config, groups, batch) | divergence | observed),
            validation=validation,
            sample_ids=batch.sample_ids,
            samples={"train": groups.trained} | responses,
            failures=failures_of({"train": groups.generated} | responses),
        )
        goes_on = recorder.end_step(outcome, clock, is_last=step == last_step)
    recorder.finish()
    return RunSummary.of(recorder.state, recorder.stopped_for)


def record_first_validation(validate: Validator, recorder: StepRecorder) -> bool:
    """Validate before the first step; return False where a request to stop gave it up, and the run ends."""
    validation, responses = validated(validate)
    if validation:
        recorder.record_start(validation, responses, failures_of(responses))
    else:
        recorder.give_up_step()
    return bool(validation)


def validated(validate: Validator) -> tuple[dict[str, float], dict[str, list[Trajectory]]]:
    """Return the metrics of a validation and its trajectories, `val`; nothing where a request to stop gave it up."""
    try:
        metrics = validate()
    except RolloutsGivenUpError:
        return {}, {}
    return metrics, {"val": validate.trajectories}


def ratio_is_one(config: GRPOMasterConfig) -> bool:
    """On-policy updates: the probability ratio is 1, so that no pass over the log-probabilities is needed.

    The responses of a step that is one update are trained on with the weights that made them.
    """
    return config.loss_fn.force_on_policy_ratio != "never" and config.updates_per_step == 1


def metrics_of_groups(config: GRPOMasterConfig, groups: RolloutGroups, batch: TokenBatch) -> dict[str, float]:
    """Return metrics of the rewards, the responses and the advantages of a step."""
    failures = failure_rule(config)
    return group_metrics(groups, failures) | advantage_metrics(batch, failures.taking_part(_scored(groups)))


def update_engine(
    engine: GenerationEngine, policy: PolicyInterface, clock: PhaseClock, observers: Sequence[RunObserver] = ()
) -> dict[str, float]:
    """Refit an engine that keeps a copy of the weights; one that shares them is always current.

    The policy makes room for generation before.

    Returns:
        Metrics of the refit, `refit/...`, and of its observers; empty where there was none.

    Raises:
        WeightSyncError: The weights did not arrive, or a check shows that the engine does not compute with them.
    """

    def during_refit() -> None:
        for each in observers:
            each.during_refit()

    policy.prepare_for_generation(clock)
    if engine.shares_weights:
        return {}
    with clock.phase("refit"):
        num_bytes = refit(engine, policy, then=during_refit)
    return {"refit/bytes": float(num_bytes)} | joined(each.after_refit(clock) for each in observers)


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
    failures, is_scored = failure_rule(config), _scored(groups)
    takes_part = failures.taking_part(is_scored)
    found = compute_advantages(failures.filled(rewards, is_scored), config.grpo.adv_estimator, takes_part)
    return failures.held_down(_within_bounds(config, found), is_scored)


def advantages_of_groups(config: GRPOMasterConfig, groups: RolloutGroups) -> Float[Tensor, "groups generations"]:
    """Advantages of the trained groups: of their shaped rewards or, by `gdpo`, of each named reward apart."""
    weights = weights_of_each_reward(config.grpo.adv_estimator, config.env.reward_weights)
    if not weights:
        return advantages_of(config, groups, shaped_rewards(config, groups))
    failures, is_scored = failure_rule(config), _scored(groups)
    named = group_named_rewards(groups.trained, groups.num_generations, weights)
    # Of a reward with a negative weight the highest is the worst.
    signs = torch.tensor([math.copysign(1.0, weight) for weight in weights.values()], dtype=named.dtype)
    filled = [sign * failures.filled(sign * rewards, is_scored) for sign, rewards in zip(signs, named, strict=True)]
    found = decoupled_advantages(
        torch.stack(filled), [*weights.values()], config.grpo.adv_estimator, failures.taking_part(is_scored)
    )
    return failures.held_down(_within_bounds(config, found), is_scored)


def _scored(groups: RolloutGroups) -> Bool[Tensor, "groups generations"]:
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
        takes_part=failure_rule(config).taking_part(_scored(groups)),
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
