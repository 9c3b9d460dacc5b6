# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Entry point of distillation: rollouts as in GRPO, teachers in workers of their own, then GRPO's loop."""

from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING

from nemo_rl_moe.algorithms.distillation import Teachers
from nemo_rl_moe.algorithms.grpo import Rollouts, train_grpo
from nemo_rl_moe.algorithms.grpo_batch import failure_rule
from nemo_rl_moe.algorithms.grpo_metrics import Validator
from nemo_rl_moe.algorithms.lag_metrics import LagMetrics
from nemo_rl_moe.algorithms.role_models import RoleModels
from nemo_rl_moe.algorithms.run_observers import RunObserver
from nemo_rl_moe.algorithms.step_recorder import num_training_steps
from nemo_rl_moe.algorithms.teacher_routes import RoutedModel, TeacherRoutes
from nemo_rl_moe.config.schema_distillation import DistillationMasterConfig
from nemo_rl_moe.config.suggestions import did_you_mean, nearest
from nemo_rl_moe.data.tokenizer import load_tokenizer, pad_token_id, vocabulary_problem
from nemo_rl_moe.errors import ConfigurationError, DataError
from nemo_rl_moe.launch.asynchronous import plan_rollouts
from nemo_rl_moe.launch.grpo import (
    PreparedRollouts,
    make_run_observers,
    prepare_rollouts,
    start_rollouts,
    start_source,
)
from nemo_rl_moe.launch.setup import PreparedModel
from nemo_rl_moe.launch.training_run import TrainingRun
from nemo_rl_moe.rollouts.given_responses import GivenResponses, check_given_responses
from nemo_rl_moe.rollouts.source import RolloutSource
from nemo_rl_moe.routing.routers import moe_layer_indices

if TYPE_CHECKING:
    from nemo_rl_moe.models.policy.lm_policy import MegatronPolicy


def run_distillation(config: DistillationMasterConfig, run: TrainingRun) -> None:
    """Run distillation from start to end.

    Raises:
        UserError: A model, a tokenizer, the environment or the prompts cannot be used.
        WorkerDiedError: A worker failed.
    """
    plan = plan_rollouts(config)
    prepared = prepare_rollouts(config, run)
    teacher_models = prepare_teachers(config, run, prepared.model)
    response_key = config.distillation.response_key
    if response_key is not None:
        check_given_responses(chain.from_iterable(prepared.training.values()), response_key)
    by_sample = teachers_of_records(config, prepared)
    loader = prepared.loader(config)
    run.begin(num_training_steps(config.grpo, len(loader)), prepared.fingerprints(config))
    if run.is_complete:
        return
    if plan is not None:
        plan.check(config, loader, run.remaining_steps.start)
    policy = run.start_policy()
    models = {name: run.start_role(name, model) for name, model in teacher_models.items()}
    run.restore()  # before engines share its GPUs
    worker = start_rollouts(config, run, policy, prepared)
    recorder = run.open()
    held_out, failures = prepared.held_out, failure_rule(config)
    source: RolloutSource
    if response_key is None:
        source = start_source(config, run, plan, worker, prepared, recorder)
    else:
        source = GivenResponses(config.grpo, worker, loader, prepared.sampling, failures, response_key)
    validate = Validator(config.grpo, worker, held_out, prepared.sampling, failures) if held_out else None
    rollouts = Rollouts(worker.engine, source, validate, pad_token_id(prepared.model.tokenizer))
    teachers = Teachers(config, models, prepared.model.hf_config.vocab_size, by_sample)
    shape = router_shape(prepared.model)
    comparable = {name: models[name] for name, model in teacher_models.items() if router_shape(model) == shape}
    observers = [
        *make_run_observers(config, policy, worker.engine, prepared.model, run),
        LagMetrics(recorder.record_artifact),
        *make_teacher_routes(config, policy, teachers, comparable if shape is not None else {}),
    ]
    summary = train_grpo(config, policy, rollouts, recorder, observers, RoleModels(teachers=teachers))
    run.end(summary)
    if summary.stopped_for is None and summary.num_steps < run.num_steps:
        run.console.warn(f"the prompts of all epochs were used up after {summary.num_steps} of {run.num_steps} steps")


def prepare_teachers(
    config: DistillationMasterConfig, run: TrainingRun, policy: PreparedModel
) -> Mapping[str, PreparedModel]:
    """Fetch and check the teachers' models; start nothing.

    Raises:
        ConfigurationError: One cannot be used, has another vocabulary than the policy, or there are not as many tokens
            as candidates.
    """
    k, size = config.distillation.topk_logits_k, policy.hf_config.vocab_size
    if k is not None and k > size:
        raise ConfigurationError(f"distillation.topk_logits_k: got {k}, expected at most the policy's {size} tokens")
    models = {name: run.prepare_role(name) for name in config.distillation.teachers}
    for name, teacher in config.distillation.teachers.items():
        key = f"distillation.teachers.{name}.model_name"
        try:
            tokenizer = load_tokenizer(teacher.model_name)
        except ConfigurationError as error:
            problems = [problem.removeprefix("policy.tokenizer.name: ") for problem in error.problems]
            raise ConfigurationError([f"{key}: {problem}" for problem in problems]) from error
        if problem := vocabulary_problem(policy.tokenizer, tokenizer):
            raise ConfigurationError(
                f"{key}: got {teacher.model_name}, which has another vocabulary than {config.policy.tokenizer.name}:"
                f" {problem}; expected a model with the policy's tokenizer"
            )
    return models


def teachers_of_records(config: DistillationMasterConfig, prepared: PreparedRollouts) -> dict[str, str]:
    """Return the name of the teacher of each sample whose record names one; empty where records do not say it.

    Raises:
        DataError: A record names another model, or no record names any.
    """
    key, names = config.distillation.teacher_key, list(config.distillation.teachers)
    if key is None:
        return {}
    found: dict[str, str] = {}
    for prompt in chain.from_iterable(prepared.training.values()):
        name = prompt.record.get(key)
        if name is None:
            continue
        if name not in names:
            raise DataError(
                f"{prompt.sample_id}: {key}: got {name!r}, expected one of {', '.join(names)}"
                f" (distillation.teachers){did_you_mean(nearest(str(name), names))}"
            )
        found[prompt.sample_id] = name
    if not found:
        raise DataError(f"no record has the key {key!r} (distillation.teacher_key), so that no response has a teacher")
    return found


def router_shape(model: PreparedModel) -> tuple[int, int, int] | None:
    """Return the MoE layers of a model, its experts, and how many of them a token gets; None without any."""
    from nemo_rl_moe.models.megatron.model.transformer_config import build_transformer_config

    config = build_transformer_config(model.policy, model.hf_config)
    layers = moe_layer_indices(config)
    return (len(layers), config.num_moe_experts, config.moe_router_topk) if layers else None


def make_teacher_routes(
    config: DistillationMasterConfig,
    policy: "MegatronPolicy",
    teachers: Teachers,
    comparable: Mapping[str, RoutedModel],
) -> list[RunObserver]:
    """Return what compares the routes of policy and teachers, where routes are captured and a teacher has them."""
    megatron = config.policy.megatron_cfg
    captures = megatron.capture_routing or megatron.routing_replay != "none"
    if not captures or not comparable or policy.moe_configuration.get("moe_router_fusion"):
        return []
    return [
        TeacherRoutes(megatron.routing_measurements, policy, comparable, teachers.rows_of, config.grpo.seed),
    ]
