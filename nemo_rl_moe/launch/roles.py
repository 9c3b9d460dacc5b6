# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Roles: models other than the policy. They are checked before any worker starts, and then started, each in separate
workers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from nemo_rl_moe.config.algorithm import roles_of
from nemo_rl_moe.config.role_keys import key_of_role, role_problems
from nemo_rl_moe.config.schema import MasterConfig
from nemo_rl_moe.config.schema_policy import FrozenRoleConfig, PolicyConfig
from nemo_rl_moe.data.tokenizer import load_tokenizer, vocabulary_problem
from nemo_rl_moe.errors import ConfigurationError, counted
from nemo_rl_moe.launch.setup import ModelRun, PreparedModel, fetch_on_machines, prepare_model
from nemo_rl_moe.models.hf_files import RANDOM_HINT
from nemo_rl_moe.models.image_rules import image_problem
from nemo_rl_moe.models.peft_files import lora_of_folder
from nemo_rl_moe.runs.loggers.console import ConsoleLogger

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from nemo_rl_moe.models.policy.model_workers import ModelWorkers

Workers = TypeVar("Workers", bound="ModelWorkers")


def role_as_policy(config: MasterConfig, role: str) -> PolicyConfig:
    """Return a role's model as a `policy` section. A frozen role's adapter sets its section `lora`."""
    model = roles_of(config)[role]
    policy = model.as_policy(config.policy)
    if not isinstance(model, FrozenRoleConfig) or model.adapter is None:
        return policy
    try:
        lora = lora_of_folder(Path(model.adapter)).model_copy(update={"path": model.adapter})
    except ConfigurationError as error:
        raise ConfigurationError(role_problems(config, role, error.problems)) from error
    return policy.model_copy(update={"lora": lora})


def prepare_role(config: MasterConfig, role: str, policy: PreparedModel, console: ConsoleLogger) -> PreparedModel:
    """Fetch, check and return the model of a role."""
    settings = role_as_policy(config, role)
    try:
        model = prepare_model(settings, console, role)
    except ConfigurationError as error:
        # A role's weights are never random, so this hint is removed.
        problems = [problem.removesuffix(f"; {RANDOM_HINT}") for problem in error.problems]
        raise ConfigurationError(role_problems(config, role, problems)) from error
    key = f"{key_of_role(config, role)}.model_name"
    if problem := image_problem(model.image_rule, policy.image_rule):
        raise ConfigurationError(
            f"{key}: got {settings.model_name}, which {problem}, expected a model that reads the"
            f" batches of policy.model_name {config.policy.model_name} as they are"
        )
    known, needed = model.hf_config.vocab_size, policy.hf_config.vocab_size
    if known < needed:
        raise ConfigurationError(
            f"{key}: {settings.model_name} has {known} tokens, expected at least the {needed} of"
            f" {config.policy.model_name}, whose tokens it reads"
        )
    return model


def tokenizer_of_role(
    key: str, model_name: str, config: MasterConfig, policy: PreparedModel
) -> "PreTrainedTokenizerBase":
    """Load and return the tokenizer of a role's model, and check that it gives the policy's tokens the same ids."""
    try:
        tokenizer = load_tokenizer(model_name)
    except ConfigurationError as error:
        problems = [problem.removeprefix("policy.tokenizer.name: ") for problem in error.problems]
        raise ConfigurationError([f"{key}: {problem}" for problem in problems]) from error
    if problem := vocabulary_problem(policy.tokenizer, tokenizer):
        raise ConfigurationError(
            f"{key}: got {model_name}, which has another vocabulary than {config.policy.tokenizer.name}:"
            f" {problem}; expected a model with the policy's tokenizer"
        )
    return tokenizer


def start_role(run: ModelRun, role: str, model: PreparedModel, start: Callable[..., Workers]) -> Workers:
    """Start the workers of a role for the rest of the run, after the policy's workers. `start` is the class of the
    workers, or a function with the same arguments."""
    place = run.start_places(role)
    if model.source.hub is not None and not place.is_local:
        fetch_on_machines(place, model.source.hub)

    @contextmanager
    def running() -> Iterator[Workers]:
        with run.console.phase(f"starting {counted(place.config.world_size, 'worker')} of the {role}"):
            try:
                workers = start(role, model.policy, place, source=model.source)
            except ConfigurationError as error:
                raise ConfigurationError(role_problems(run.config, role, error.problems)) from error
        try:
            yield workers
        finally:
            workers.shutdown()

    return run.use(running())
