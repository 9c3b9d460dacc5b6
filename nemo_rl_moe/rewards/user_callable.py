# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A reward function that calls a Python function of the user."""

import math
from collections.abc import Mapping
from inspect import isclass
from numbers import Real
from typing import Any

import numpy as np

from nemo_rl_moe.config.environments.rewards import CallableConfig
from nemo_rl_moe.config.user_code import described, import_function
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.rewards.interface import Score, ScoringItem

KEY = "env.reward.function"
FULL_REWARD = 1.0


class CallableReward:
    """Reward function that calls the user's function with a `ScoringItem`.

    The user's function returns a number, or a dict (name -> reward). The response is right if the number, or the first
    reward of the dict, is at least 1. The function may also return a pair of a number or dict and a bool, which is true
    if the response is right. The score must only depend on the item, because the worker and the order of responses are
    undefined.
    """

    def __init__(self, config: CallableConfig):
        self._function = import_function(KEY, config.function, "one ScoringItem")
        if isclass(self._function):
            raise ConfigurationError(
                f"{KEY}: {config.function} is a class, expected a function; for a class, set env.reward.kind=custom and"
                " env.reward.factory"
            )

    def score(self, item: ScoringItem) -> Score:
        return as_score(KEY, self._function(item))


def as_score(key: str, result: object) -> Score:
    """Return the result of a user's function as a score.

    Args:
        key: Key of the function in the configuration, for the error message.
        result: A number, a dict (name -> number), or a pair of a number or dict and a bool.

    Raises:
        TypeError: The result is something else.
    """
    reward: Any = result
    is_correct: bool | None = None
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], bool | np.bool_):
        reward, is_correct = result[0], bool(result[1])
    if _is_number(reward):
        return Score(_as_float(reward), bool(reward >= FULL_REWARD) if is_correct is None else is_correct)
    if _are_rewards(reward):
        first = next(iter(reward.values()))
        rewards = {name: _as_float(value) for name, value in reward.items()}
        return Score.named(rewards, is_correct=bool(first >= FULL_REWARD) if is_correct is None else is_correct)
    raise TypeError(
        f"{key} returned {described(result)}, expected a number, or a dict of numbers by name, or a pair of either"
        " and a bool"
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, Real | np.bool_)


def _as_float(value: Any) -> float:
    """Return a number as float. A number that is too large becomes infinite, which `checked_score` refuses."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _are_rewards(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and len(value) > 0
        and all(isinstance(name, str) and _is_number(reward) for name, reward in value.items())
    )
