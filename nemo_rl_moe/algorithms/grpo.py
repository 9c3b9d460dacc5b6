# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Group relative policy optimization (DeepSeekMath, https://arxiv.org/abs/2402.03300), synchronous."""

from nemo_rl_moe.algorithms.grpo_batch import (
    add_logprobs,
    failure_rule,
    make_batch,
    ratio_is_one,
    scored_groups,
    take_divergence_from_rewards,
)
from nemo_rl_moe.algorithms.grpo_metrics import Validator, advantage_metrics, group_metrics
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
from nemo_rl_moe.distributed.batch import TokenBatch
from nemo_rl_moe.generation.interface import GenerationEngine
from nemo_rl_moe.generation.refit import refit
from nemo_rl_moe.metrics import PhaseClock
from nemo_rl_moe.models.interfaces import PolicyInterface
from nemo_rl_moe.moe.replay import ROUTED_EXPERTS
from nemo_rl_moe.rollouts.faults import TapeWatch
from nemo_rl_moe.rollouts.limits import RolloutsGivenUpError
from nemo_rl_moe.rollouts.source import RolloutSource
from nemo_rl_moe.rollouts.trajectory import Trajectory
from nemo_rl_moe.run_folder.failures import failures_of
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
    failures = failure_rule(config)
    source.load_state_dict({"batches_taken": recorder.state.batches_taken})
    step = recorder.state.step
    goes_on = step < last_step and not source.is_used_up

    update_engine(engine, policy, PhaseClock(), refit_check)
    if recorder.is_fresh and validate is not None and config.grpo.val_at_start:
        validation, responses = validated(validate)
        if validation:
            recorder.record_start(validation, responses, failures_of(responses))
        else:
            goes_on = False
            recorder.give_up_step()
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
        validation, responses = ({}, {}) if due is None else validated(due)
        of_rewards = group_metrics(groups, failures) | advantage_metrics(
            batch, failures.taking_part(scored_groups(groups))
        )
        outcome = StepOutcome(
            batches_taken=source.state_dict()["batches_taken"],
            result=result,
            training=training_metrics(result, of_rewards | divergence | refit_metrics, routing),
            validation=validation,
            sample_ids=batch.sample_ids,
            samples={"train": groups.trained} | responses,
            failures=failures_of({"train": groups.generated} | responses),
        )
        goes_on = recorder.end_step(outcome, clock, is_last=step == last_step)
    recorder.finish()
    return RunSummary.of(recorder.state, recorder.stopped_for)


def validated(validate: Validator) -> tuple[dict[str, float], dict[str, list[Trajectory]]]:
    """Return the metrics of a validation and its trajectories, `val`; nothing where a request to stop gave it up."""
    try:
        metrics = validate()
    except RolloutsGivenUpError:
        return {}, {}
    return metrics, {"val": validate.trajectories}


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
