# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The environments by name."""

from collections.abc import Callable

from nemo_rl_moe.config.schema_grpo import EnvironmentConfig
from nemo_rl_moe.config.suggestions import did_you_mean, nearest
from nemo_rl_moe.environments.answers import AnswerEnvironment
from nemo_rl_moe.environments.interface import Environment
from nemo_rl_moe.environments.math import MathEnvironment
from nemo_rl_moe.environments.reasoning_gym import ReasoningGymEnvironment
from nemo_rl_moe.environments.user_callable import CallableEnvironment
from nemo_rl_moe.errors import ConfigurationError


def make_environment(config: EnvironmentConfig) -> Environment:
    """Makes the environment that a configuration describes.

    Raises:
        ConfigurationError: It cannot be made; says which setting is wrong.
    """
    maker = ENVIRONMENTS.get(config.name)
    if maker is None:
        known = ", ".join(sorted(ENVIRONMENTS))
        hint = did_you_mean(nearest(config.name, ENVIRONMENTS))
        raise ConfigurationError(f"env.name: got {config.name!r}, expected one of {known}{hint}")
    return AnswerEnvironment(maker(config), config.answer_after, config.score_truncated)


def validate_environment(config: EnvironmentConfig) -> None:
    """Finds on the driver whatever is wrong with an environment, before a worker starts: makes it once.

    Raises:
        ConfigurationError: A library, a task, a parameter, a module or a function is missing or wrong.
    """
    make_environment(config)


def _make_math(config: EnvironmentConfig) -> Environment:
    return MathEnvironment()


def _make_reasoning_gym(config: EnvironmentConfig) -> Environment:
    if config.reasoning_gym is None:
        raise ConfigurationError(_missing("reasoning_gym", "task, parameters and partial_credit"))
    return ReasoningGymEnvironment(config.reasoning_gym)


def _make_callable(config: EnvironmentConfig) -> Environment:
    if config.callable is None:
        raise ConfigurationError(_missing("callable", "function"))
    return CallableEnvironment(config.callable)


def _missing(section: str, keys: str) -> str:
    return f"env.{section}: null, but env.name is {section}, which needs that section with {keys}"


ENVIRONMENTS: dict[str, Callable[[EnvironmentConfig], Environment]] = {
    "math": _make_math,
    "reasoning_gym": _make_reasoning_gym,
    "callable": _make_callable,
}
