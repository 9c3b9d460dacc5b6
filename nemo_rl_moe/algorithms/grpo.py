# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Group relative policy optimization (DeepSeekMath, https://arxiv.org/abs/2402.03300), synchronous."""

import torch
from jaxtyping import Float
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
from nemo_rl_moe.algorithms.routing_measurements import RoutingMeasurements
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
from nemo_rl_moe.rollouts.faults import TapeWatch
from nemo_rl_moe.rollouts.source import RolloutGroups, RolloutSource, weights_of_each_reward
from nemo_rl_moe.rollouts.trajectory import (
    group_named_rewards,
    group_rewards,
    group_sampled_tokens,
    training_batch,
)
from nemo_rl_moe.weight_sync.refit_check import RefitCheck, ScoringEngine


def train_grpo(
    config: GRPOMasterConfig,
    policy: PolicyInterface,
    engine: GenerationEngine,
    source: RolloutSource,
    validate: Validator | None,
    pad_token_id: int,
    recorder: StepRecorder,
    refit_check: RefitCheck | None = None,
    tape_watch: TapeWatch | None = None,
    measurements: RoutingMeasurements | None = None,
) -> RunSummary:
    """Trains from where the run stands to its last step, validates when due, and ends each step with the recorder.

    Args:
        config: The whole configuration.
        policy: What is trained.
        engine: Generates; gets the policy's weights before it does.
        source: Gives the trajectories to train on.
        validate: Validates the policy on held-out prompts; None without any.
        pad_token_id: What stands after a sequence's end.
        recorder: Records each step, saves, and says when to stop.
        refit_check: Checks each refit; None where the engine shares the weights or cannot be checked.
        tape_watch: Hears what is wrong with the routed experts of the rollouts; None: nobody does.
        measurements: Explains the routing of some steps; None: nobody does.
    """
    last_step = num_training_steps(config.grpo, source.steps_per_epoch)
    loss_function = PolicyGradientLoss(config.loss_fn, on_policy=ratio_is_one(config))
    source.load_state_dict({"batches_taken": recorder.state.batches_taken})
    step = recorder.state.step
    goes_on = step < last_step and not source.is_used_up

    update_engine(engine, policy, PhaseClock(), refit_check)
    if recorder.is_fresh and validate is not None and config.grpo.val_at_start:
        recorder.record_start(validate(), {"val": validate.trajectories})
    while goes_on:
        clock = PhaseClock()
        with clock.phase("step"):
            groups = source.next(step, clock)
            step += 1
            if source.is_used_up:  # dynamic sampling may come to their end before the last step
                last_step = step
            batch = make_batch(config, groups, pad_token_id)
            routing = tape_volume(batch)
            if measurements is not None:
                routing |= measurements.before_updates(step, batch, groups.trained, clock)
            batch = add_logprobs(config, policy, batch, clock)
            batch, divergence = take_divergence_from_rewards(config, groups, batch)
            policy.prepare_for_training(clock)
            with clock.phase("train"):
                result = policy.train(batch, loss_function)
            clock.count_tokens("train", result.num_tokens)
            if result.tape_report is not None:
                recorder.record_tape(result.tape_report)
                if tape_watch is not None:
                    tape_watch.observe(result.tape_report.anomalies)
            if measurements is not None:
                routing |= measurements.after_updates(clock)
            refit_metrics = update_engine(engine, policy, clock, refit_check)
            if measurements is not None:
                routing |= measurements.after_refit(clock)
        due = validate if validation_is_due(config.grpo, step, last_step) else None
        outcome = StepOutcome(
            batches_taken=source.state_dict()["batches_taken"],
            result=result,
            training=training_metrics(
                result, group_metrics(groups) | advantage_metrics(batch) | divergence | refit_metrics, routing
            ),
            validation={} if due is None else due(),
            sample_ids=batch.sample_ids,
            samples={"train": groups.trained} | ({} if due is None else {"val": due.trajectories}),
        )
        goes_on = recorder.end_step(outcome, clock, is_last=step == last_step)
    recorder.finish()
    return RunSummary.of(recorder.state, recorder.stopped_for)


def ratio_is_one(config: GRPOMasterConfig) -> bool:
    """On-policy updates: the probability ratio is 1, so that no pass over the log-probabilities is needed.

    The responses of a step that is one update are trained on with the weights that made them.
    """
    return config.loss_fn.force_on_policy_ratio != "never" and config.updates_per_step == 1


def tape_volume(batch: TokenBatch) -> dict[str, float]:
    """Metric `routing/tape_bytes`: size of the batch's tape of routed experts; empty without one."""
    tape = batch.stored.get(ROUTED_EXPERTS)
    if tape is None:
        return {}
    return {"routing/tape_bytes": float(sum(rows.num_bytes for rows in tape.rows if rows is not None))}


def update_engine(
    engine: GenerationEngine, policy: PolicyInterface, clock: PhaseClock, check: RefitCheck | None = None
) -> dict[str, float]:
    """Refit of an engine that keeps a copy of the weights; one that shares them is always current.

    What generation leaves no room for makes place before.

    Returns:
        Metrics of the refit, `refit/...`; empty where there was none.

    Raises:
        WeightSyncError: The weights did not arrive, or the check shows that the engine does not compute with them.
    """
    policy.prepare_for_generation(clock)
    if engine.shares_weights:
        return {}
    with clock.phase("refit"):
        num_bytes = refit(engine, policy) if check is None else refit(engine, policy, then=check.begin)
    metrics = {"refit/bytes": float(num_bytes)}
    if check is None:
        return metrics
    assert isinstance(engine, ScoringEngine)  # others have no check
    with clock.phase("refit_check"):
        gap = check.after_refit(engine)
    if check.share_compared is not None:
        metrics["refit/weights_compared"] = check.share_compared
    return metrics | {"refit/logprob_gap": gap.largest, "refit/checks_failed": float(check.num_failed)}


def shaped_rewards(config: GRPOMasterConfig, groups: RolloutGroups) -> Float[Tensor, "groups generations"]:
    """Rewards of the trained groups after the punishment of long responses."""
    num_generations = config.grpo.num_generations_per_prompt
    return shape_rewards(
        group_rewards(groups.trained, num_generations),
        group_sampled_tokens(groups.trained, num_generations),
        config.policy.generation.max_new_tokens,
        config.grpo.reward_shaping,
    )


def advantages_of(
    config: GRPOMasterConfig, rewards: Float[Tensor, "groups generations"]
) -> Float[Tensor, "groups generations"]:
    """Advantages that the estimator makes of one reward a response, held between the configuration's bounds."""
    return _within_bounds(config, compute_advantages(rewards, config.grpo.adv_estimator))


def advantages_of_groups(config: GRPOMasterConfig, groups: RolloutGroups) -> Float[Tensor, "groups generations"]:
    """Advantages of the trained groups: of their shaped rewards or, by `gdpo`, of each named reward apart."""
    weights = weights_of_each_reward(config.grpo.adv_estimator, config.env.reward_weights)
    if not weights:
        return advantages_of(config, shaped_rewards(config, groups))
    named = group_named_rewards(groups.trained, config.grpo.num_generations_per_prompt, weights)
    return _within_bounds(config, decoupled_advantages(named, [*weights.values()], config.grpo.adv_estimator))


def _within_bounds(
    config: GRPOMasterConfig, advantages: Float[Tensor, "groups generations"]
) -> Float[Tensor, "groups generations"]:
    return clip_advantages(advantages, config.grpo.advantage_clip_low, config.grpo.advantage_clip_high)


def make_batch(config: GRPOMasterConfig, groups: RolloutGroups, pad_token_id: int) -> TokenBatch:
    """The trained groups with their advantages."""
    advantages = advantages_of_groups(config, groups)
    return training_batch(groups.trained, advantages, pad_token_id, leave_out_truncated=config.grpo.overlong_filtering)


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
    advantages = advantages_of(config, rewards)
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
