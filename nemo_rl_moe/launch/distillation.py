# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Entry point of distillation: GRPO's rollouts and loop, with teachers in separate workers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from nemo_rl_moe.algorithms.distillation import Teachers
from nemo_rl_moe.algorithms.role_models import RoleModels
from nemo_rl_moe.algorithms.run_observers import RunObserver
from nemo_rl_moe.algorithms.teacher_routes import TeacherRoutes
from nemo_rl_moe.config.schema_distillation import DistillationMasterConfig
from nemo_rl_moe.config.suggestions import did_you_mean, nearest
from nemo_rl_moe.errors import ConfigurationError, DataError
from nemo_rl_moe.launch.grpo import PreparedRoles, PreparedRollouts, run_grpo
from nemo_rl_moe.launch.roles import tokenizer_of_role
from nemo_rl_moe.launch.setup import PreparedModel, require_adapter_of_token_predictor
from nemo_rl_moe.launch.training_run import TrainingRun
from nemo_rl_moe.models.classifiers import require_token_predictor
from nemo_rl_moe.models.hf_files import load_config_json
from nemo_rl_moe.rollouts.given_responses import GivenResponses, check_given_responses
from nemo_rl_moe.rollouts.runner import RolloutRunner
from nemo_rl_moe.rollouts.source import PromptRounds, RolloutSource
from nemo_rl_moe.routing.routers import moe_layer_indices

if TYPE_CHECKING:
    from nemo_rl_moe.models.policy.lm_policy import MegatronPolicy
    from nemo_rl_moe.models.policy.model_workers import ModelWorkers


def run_distillation(config: DistillationMasterConfig, run: TrainingRun) -> None:
    """Run distillation from start to end."""

    def prepare_roles(prepared: PreparedRollouts) -> PreparedRoles:
        models = prepare_teachers(config, run, prepared.model)
        response_key = config.distillation.response_key
        if response_key is not None:
            check_given_responses(chain.from_iterable(prepared.training.values()), response_key)
        return PreparedTeachers(config, run, prepared, models, teachers_of_records(config, prepared))

    run_grpo(config, run, prepare_roles)


@dataclass(frozen=True)
class PreparedTeachers(PreparedRoles):
    """The teachers of a run. They are checked before any worker starts.

    Attributes:
        models: Name -> teacher.
        by_sample: Sample id -> name of its teacher, for samples whose record names a teacher.
    """

    config: DistillationMasterConfig
    run: TrainingRun
    prepared: PreparedRollouts
    models: Mapping[str, PreparedModel]
    by_sample: Mapping[str, str]

    def start(self, policy: "MegatronPolicy") -> tuple[RoleModels, Sequence[RunObserver]]:
        config, own = self.config, self.prepared.model
        started = {name: self.run.start_role(name, model) for name, model in self.models.items()}
        teachers = Teachers(config, started, own.hf_config.vocab_size, self.by_sample)
        shape = router_shape(own)
        comparable = {name: started[name] for name, model in self.models.items() if router_shape(model) == shape}
        routes = make_teacher_routes(config, policy, teachers, comparable if shape is not None else {})
        return RoleModels(teachers=teachers), routes

    def own_source(self, runner: RolloutRunner, loader: PromptRounds, batches_taken: int) -> RolloutSource | None:
        config, response_key = self.config, self.config.distillation.response_key
        if response_key is None:
            return None
        sampling = self.prepared.sampling
        end = self.prepared.model.speech.end_of_response(sampling.stop_token_ids)
        return GivenResponses(runner, loader, config.grpo.max_num_epochs, response_key, end, batches_taken)


def prepare_teachers(
    config: DistillationMasterConfig, run: TrainingRun, policy: PreparedModel
) -> Mapping[str, PreparedModel]:
    """Fetch and check the teachers' models without starting workers. Return them by name."""
    k, size = config.distillation.topk_logits_k, policy.hf_config.vocab_size
    if k is not None and k > size:
        raise ConfigurationError(f"distillation.topk_logits_k: got {k}, expected at most the policy's {size} tokens")
    models = {name: run.prepare_role(name) for name in config.distillation.teachers}
    for name, teacher in config.distillation.teachers.items():
        key, folder = f"distillation.teachers.{name}.model_name", models[name].source.folder()
        require_token_predictor(load_config_json(str(folder)), key, teacher.model_name)
        if teacher.adapter is not None:
            require_adapter_of_token_predictor(f"distillation.teachers.{name}.adapter", teacher.adapter)
        tokenizer_of_role(key, teacher.model_name, config, policy)
    return models


def teachers_of_records(config: DistillationMasterConfig, prepared: PreparedRollouts) -> dict[str, str]:
    """Sample id -> name of its teacher, for samples whose record names a teacher. Empty if `teacher_key` is null."""
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
    """Return the numbers of MoE layers, of experts in a layer, and of experts for each token, or None without MoE
    layers."""
    from nemo_rl_moe.models.megatron.model.transformer_config import build_transformer_config

    config = build_transformer_config(model.policy, model.hf_config)
    layers = moe_layer_indices(config)
    return (len(layers), config.num_moe_experts, config.moe_router_topk) if layers else None


def make_teacher_routes(
    config: DistillationMasterConfig,
    policy: "MegatronPolicy",
    teachers: Teachers,
    comparable: Mapping[str, "ModelWorkers"],
) -> list[RunObserver]:
    """Return the observer that compares the routes of policy and teachers. Empty if no routes are captured or no
    teacher is comparable."""
    megatron = config.policy.megatron_cfg
    captures = megatron.capture_routing or megatron.routing_replay != "none"
    if not captures or not comparable or policy.moe_configuration.get("moe_router_fusion"):
        return []
    return [TeacherRoutes(megatron.routing_measurements, policy, comparable, teachers.rows_of, config.grpo.seed)]
