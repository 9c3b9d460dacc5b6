# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Group relative policy optimization (DeepSeekMath, https://arxiv.org/abs/2402.03300)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nemo_rl_moe.algorithms.grpo_batch import (
    add_logprobs,
    failure_rule,
    make_batch,
    make_loss,
    trained_responses,
    with_last_advantages,
    with_selected_tokens,
)
from nemo_rl_moe.algorithms.grpo_metrics import Validator, advantage_metrics, group_metrics
from nemo_rl_moe.algorithms.logged_samples import logged_samples
from nemo_rl_moe.algorithms.role_models import NO_ROLES, RoleModels
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
from nemo_rl_moe.distributed.batch import TokenBatch
from nemo_rl_moe.generation.interface import GenerationEngine
from nemo_rl_moe.generation.refit import refit
from nemo_rl_moe.metrics import PhaseClock
from nemo_rl_moe.models.interfaces import TrainResult
from nemo_rl_moe.rollouts.source import RolloutGroups, RolloutSource
from nemo_rl_moe.rollouts.supervisor import RolloutsGivenUpError
from nemo_rl_moe.rollouts.trajectory import Trajectory
from nemo_rl_moe.runs.folder.failures import failures_of

if TYPE_CHECKING:
    from nemo_rl_moe.models.policy.lm_policy import MegatronPolicy


@dataclass(frozen=True)
class Rollouts:
    """Parts of a run that produce trajectories.

    Attributes:
        engine: Engine that gets the policy's weights before it generates.
        validate: Validator of the policy on held-out prompts, if there are any.
        pad_token_id: Token that fills a batch after the end of each sequence.
    """

    engine: GenerationEngine
    source: RolloutSource
    validate: Validator | None
    pad_token_id: int


def train_grpo(
    config: GRPOMasterConfig,
    policy: "MegatronPolicy",
    rollouts: Rollouts,
    recorder: StepRecorder,
    observers: Sequence[RunObserver] = (),
    roles: RoleModels = NO_ROLES,
) -> RunSummary:
    """Train to the last step, validate when due, and end each step with the recorder.

    Args:
        roles: Other models that take part in a step, such as a critic or teachers.
    """
    engine, source, validate = rollouts.engine, rollouts.source, rollouts.validate
    last_step = num_training_steps(config.grpo, source.steps_per_epoch)
    step = recorder.state.step
    goes_on = step < last_step and not source.is_used_up

    update_engine(engine, policy, PhaseClock(), observers, source, step)
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
            if source.is_used_up:  # dynamic sampling may use up the prompts before the last step
                last_step = step
            batch = make_batch(config, groups, rollouts.pad_token_id, policy.weight_version)
            observed = joined(each.before_update(step, batch, groups.trained, clock) for each in observers)
            batch = add_logprobs(config, policy, batch, clock)
            batch, divergence = with_last_advantages(config, groups, batch)
            batch, of_roles = roles.before_update(policy, groups, batch, clock)
            batch, of_selection = with_selected_tokens(config, batch, step)
            observed |= of_roles | of_selection
            result = TrainResult.of_no_update(policy.weight_version)
            if roles.train_policy(step):
                policy.prepare_for_training(clock)
                with clock.phase("train"):
                    result = policy.train(batch, roles.loss(make_loss(config, is_on_policy=groups.is_on_policy)))
                clock.count_tokens("train", result.num_tokens)
                recorder.record_artifacts(result.artifacts)
                observed |= joined(each.after_update(result, clock) for each in observers)
            observed |= update_engine(engine, policy, clock, observers, source, step)
        due = validate if validation_is_due(config.grpo, step, last_step) else None
        validation, responses = ({}, {}) if due is None else validated(due)
        state = source.state(step)
        outcome = StepOutcome(
            batches_taken=state.batches_taken,
            result=result,
            training=training_metrics(result, metrics_of_groups(config, groups, batch) | divergence | observed),
            validation=validation,
            sample_ids=batch.sample_ids,
            samples={"train": logged_samples(config, groups)} | responses,
            failures=failures_of({"train": groups.generated} | responses),
            write_more=state.write,
        )
        goes_on = recorder.end_step(outcome, clock, is_last=step == last_step)
    recorder.finish()
    return RunSummary.of(recorder.state, recorder.stopped_for)


def record_first_validation(validate: Validator, recorder: StepRecorder) -> bool:
    """Validate before the first step. Return False if a request to stop interrupted it, so that the run ends."""
    validation, responses = validated(validate)
    if validation:
        recorder.record_start(validation, responses, failures_of(responses))
    else:
        recorder.give_up_step()
    return bool(validation)


def validated(validate: Validator) -> tuple[dict[str, float], dict[str, list[Trajectory]]]:
    """Return the metrics of a validation, and a mapping from `val` to the validation's trajectories.

    Both are empty if a request to stop interrupted the validation.
    """
    try:
        metrics = validate()
    except RolloutsGivenUpError:
        return {}, {}
    return metrics, {"val": validate.trajectories}


def metrics_of_groups(config: GRPOMasterConfig, groups: RolloutGroups, batch: TokenBatch) -> dict[str, float]:
    """Return metrics of the rewards, responses and advantages of a step."""
    failures = failure_rule(config)
    trained = trained_responses(config, groups)
    return group_metrics(groups, failures) | advantage_metrics(batch, trained) | dict(groups.metrics)


def update_engine(
    engine: GenerationEngine,
    policy: "MegatronPolicy",
    clock: PhaseClock,
    observers: Sequence[RunObserver] = (),
    source: RolloutSource | None = None,
    step: int = 0,
) -> dict[str, float]:
    """Refit an engine that keeps a copy of the weights, and return metrics.

    An engine that shares the policy's weights needs no refit.

    First, the policy makes room for generation, and a source that generates in the background pauses.

    Args:
        source: Source that uses the engine, if any.
        step: Number of completed steps.

    Returns:
        Metrics of the refit, `refit/...`, and metrics of the observers. Empty without a refit.

    Raises:
        WeightSyncError: The weights did not arrive, or a check shows that the engine does not compute with them.
    """

    def during_refit() -> None:
        for each in observers:
            each.during_refit()

    policy.prepare_for_generation(clock)
    if source is not None:
        source.update_pending(step)
    metrics: dict[str, float] = {}
    if not engine.shares_weights:
        with clock.phase("refit"):
            num_bytes = refit(engine, policy, then=during_refit)
        metrics = {"refit/bytes": float(num_bytes)} | joined(each.after_refit(clock) for each in observers)
    if source is not None:
        source.updated(step)
    return metrics
