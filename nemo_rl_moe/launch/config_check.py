# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks that everything that a configuration names exists (files, folders, models, libraries and the user's code), and
that the models fit their layout."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from nemo_rl_moe.config.algorithm import roles_of
from nemo_rl_moe.config.checks import path_problems
from nemo_rl_moe.config.schema import GRPOMasterConfig, MasterConfig
from nemo_rl_moe.config.schema_policy import FrozenRoleConfig, PolicyConfig, RoleModelConfig
from nemo_rl_moe.config.schema_run import POLICY_ROLE
from nemo_rl_moe.errors import ConfigurationError, DataError
from nemo_rl_moe.runs.loggers.factory import find_custom_backends


def missing_parts(config: MasterConfig) -> list[str]:
    """Return a line for each problem with which a run would end before it reads weights and data.

    The hub is not asked for models and data.
    """
    problems = path_problems(config, is_whole=True)
    for check in (*_checks_of_models(config), *_checks_of_code(config)):
        try:
            check()
        except ConfigurationError as error:
            problems += error.problems
        except DataError as error:
            problems.append(str(error))
    return list(dict.fromkeys(problems))


def _checks_of_models(config: MasterConfig) -> Iterator[Callable[[], object]]:
    """Yield functions that raise if a local model cannot be laid out or computed as the configuration says."""
    models: dict[str, PolicyConfig | RoleModelConfig] = {POLICY_ROLE: config.policy, **roles_of(config)}
    here = [name for name, model in models.items() if _is_here(model)]
    if not here:
        return
    # Imported here: Megatron-Core takes seconds.
    from nemo_rl_moe.launch.plan_roles import role_transformer
    from nemo_rl_moe.models.hf_files import load_config_json, load_hf_config
    from nemo_rl_moe.models.megatron.model.planned_machine import planned_with_gpus
    from nemo_rl_moe.models.megatron.model.transformer_config import build_transformer_config
    from nemo_rl_moe.models.position_limit import too_long_sequences

    def check(name: str) -> None:
        # A configuration for GPUs may be written on a machine without them.
        with planned_with_gpus() if config.cluster.gpus_per_node else nullcontext():
            if name != POLICY_ROLE:
                role_transformer(config, name, roles_of(config)[name])
                return
            hf_config = load_hf_config(config.policy.model_name)
            build_transformer_config(config.policy, hf_config)
            if isinstance(config, GRPOMasterConfig):
                config.policy.generation.engine.check_model(config, hf_config)
            if problems := too_long_sequences(config.policy, load_config_json(config.policy.model_name)):
                raise ConfigurationError(problems)

    yield from (partial(check, name) for name in here)


def _is_here(model: PolicyConfig | RoleModelConfig) -> bool:
    """Return whether a model, and the adapter of a frozen one, are folders. `path_problems` names one that is not."""
    adapter = model.adapter if isinstance(model, FrozenRoleConfig) else None
    return (Path(model.model_name) / "config.json").is_file() and (adapter is None or Path(adapter).is_dir())


def _checks_of_code(config: MasterConfig) -> Iterator[Callable[[], object]]:
    """Yield the functions that a run calls before it reads the model. Each raises if code is missing or wrong."""
    yield partial(find_custom_backends, config.logger)
    if not isinstance(config, GRPOMasterConfig):
        return
    # Imported here: torch takes seconds, and other algorithms have no such code.
    from nemo_rl_moe.algorithms.custom_estimator import check_estimator
    from nemo_rl_moe.algorithms.losses.custom_objective import check_objective
    from nemo_rl_moe.launch.environments import check_environments
    from nemo_rl_moe.launch.rollouts import plan_rollouts

    yield partial(check_environments, config)
    yield partial(check_estimator, config)
    yield partial(check_objective, config.loss_fn)
    yield partial(plan_rollouts, config)
