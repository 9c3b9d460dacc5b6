# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Group relative policy optimization (DeepSeekMath, https://arxiv.org/abs/2402.03300), synchronous."""

from collections.abc import Sequence
from dataclasses import replace

from nemo_rl_moe.algorithms.advantages import compute_advantages, shape_rewards
from nemo_rl_moe.algorithms.grpo_metrics import advantage_metrics, group_metrics
from nemo_rl_moe.algorithms.grpo_validation import Validator
from nemo_rl_moe.algorithms.losses.policy_gradient import PolicyGradientLoss
from nemo_rl_moe.algorithms.step_metrics import training_metrics
from nemo_rl_moe.algorithms.step_recorder import (
    RunSummary,
    StepOutcome,
    StepRecorder,
    num_training_steps,
    validation_is_due,
)
from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.data.prompts import Prompt
from nemo_rl_moe.distributed.batch import TokenBatch
from nemo_rl_moe.generation.interface import SamplingParameters
from nemo_rl_moe.metrics import PhaseClock
from nemo_rl_moe.models.interfaces import PolicyInterface
from nemo_rl_moe.rollouts.rollouts import Roller, response_lengths, rewards_of, training_batch
from nemo_rl_moe.rollouts.source import PromptRounds, PromptStream, RolloutGroups, collect_groups


def train_grpo(
    config: GRPOMasterConfig,
    policy: PolicyInterface,
    roller: Roller,
    loader: PromptRounds,
    validation_prompts: Sequence[Prompt] | None,
    sampling: SamplingParameters,
    pad_token_id: int,
    recorder: StepRecorder,
) -> RunSummary:
    """Trains from where the run stands to its last step, validates when due, and ends each step with the recorder.

    Args:
        config: The whole configuration.
        policy: What is trained.
        roller: Generates with the policy's weights, and scores.
        loader: The prompts to train on.
        validation_prompts: The held-out ones; None without validation data.
        sampling: How training responses are drawn.
        pad_token_id: What stands after a sequence's end.
        recorder: Records each step, saves, and says when to stop.
    """
    last_step = num_training_steps(config.grpo, len(loader))
    loss_function = PolicyGradientLoss(config.loss_fn, on_policy=ratio_is_one(config))
    validate = Validator(config.grpo, roller, validation_prompts or (), sampling)
    prompts = PromptStream(loader, config.grpo.max_num_epochs, recorder.state.batches_taken)
    step = recorder.state.step
    goes_on = step < last_step and not prompts.is_used_up

    refresh_generation(roller, policy, step * config.updates_per_step, PhaseClock())
    if recorder.is_fresh and config.grpo.val_at_start:
        recorder.record_start(validate(), {"val": validate.rollouts})
    while goes_on:
        clock = PhaseClock()
        with clock.phase("step"):
            groups = collect_groups(config.grpo, roller, prompts, sampling, step, clock)
            step += 1
            if prompts.is_used_up:  # dynamic sampling may come to their end before the last step
                last_step = step
            batch = make_batch(config, groups, pad_token_id)
            batch = add_logprobs(config, policy, batch, clock)
            with clock.phase("train"):
                result = policy.train(batch, loss_function)
            clock.count_tokens("train", result.num_tokens)
            refresh_generation(roller, policy, step * config.updates_per_step, clock)
        is_due = validation_is_due(config.grpo, step, last_step)
        outcome = StepOutcome(
            batches_taken=prompts.rounds_taken,
            result=result,
            training=training_metrics(result, group_metrics(groups) | advantage_metrics(batch)),
            validation=validate() if is_due else {},
            sample_ids=batch.sample_ids,
            samples={"train": groups.trained} | ({"val": validate.rollouts} if is_due else {}),
        )
        goes_on = recorder.end_step(outcome, clock, is_last=step == last_step)
    recorder.finish()
    return RunSummary.of(recorder.state, recorder.stopped_for)


def ratio_is_one(config: GRPOMasterConfig) -> bool:
    """Whether the probability ratio is 1 in every update, so that no pass over the log-probabilities is needed.

    The responses of a step that is one update are trained on with the weights that made them.
    """
    return config.loss_fn.force_on_policy_ratio != "never" and config.updates_per_step == 1


def refresh_generation(roller: Roller, policy: PolicyInterface, weight_version: int, clock: PhaseClock) -> None:
    """Hands the current weights to an engine that keeps a copy."""
    if not roller.generation.shares_weights:
        with clock.phase("refit"):
            roller.generation.refit(policy.weights(), weight_version)


def make_batch(config: GRPOMasterConfig, groups: RolloutGroups, pad_token_id: int) -> TokenBatch:
    """The trained groups with their advantages."""
    num_generations = config.grpo.num_generations_per_prompt
    rewards = shape_rewards(
        rewards_of(groups.trained, num_generations),
        response_lengths(groups.trained, num_generations),
        config.policy.generation.max_new_tokens,
        config.grpo.reward_shaping,
    )
    advantages = compute_advantages(rewards, config.grpo.adv_estimator)
    return training_batch(groups.trained, advantages, pad_token_id, leave_out_truncated=config.grpo.overlong_filtering)


def add_logprobs(config: GRPOMasterConfig, policy: PolicyInterface, batch: TokenBatch, clock: PhaseClock) -> TokenBatch:
    """The batch with the log-probabilities that the loss needs: before the first update, and of the reference model."""
    extras = dict(batch.extras)
    if not ratio_is_one(config):
        with clock.phase("logprobs"):
            extras["prev_logprobs"] = policy.logprobs(batch)
    if config.loss_fn.reference_policy_kl_penalty > 0:
        with clock.phase("reference_logprobs"):
            extras["reference_logprobs"] = policy.reference_logprobs(batch)
    return replace(batch, extras=extras)
