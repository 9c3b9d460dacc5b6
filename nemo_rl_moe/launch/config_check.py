# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks that everything that a configuration names exists: files, folders, models, libraries and the user's code."""

from collections.abc import Callable, Iterator
from functools import partial

from nemo_rl_moe.config.checks import path_problems
from nemo_rl_moe.config.schema import GRPOMasterConfig, MasterConfig
from nemo_rl_moe.errors import ConfigurationError, DataError
from nemo_rl_moe.runs.loggers.factory import find_custom_backends


def missing_parts(config: MasterConfig) -> list[str]:
    """Return a line for each problem with which a run would end before it reads its model and data.

    The hub is not asked for models and data.
    """
    problems = path_problems(config, is_whole=True)
    for check in _checks_of_code(config):
        try:
            check()
        except ConfigurationError as error:
            problems += error.problems
        except DataError as error:
            problems.append(str(error))
    return list(dict.fromkeys(problems))


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
