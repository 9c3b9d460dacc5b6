# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A Python function of the user's own as reward function."""

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
    """Score a response with a function of a `ScoringItem`.

    The function returns a reward, a number; a response is then right when its reward is 1 or more. Or it returns
    several rewards by name, a dict, of which the first says so in the same way. Or it returns a pair of either and a
    bool that says whether the response is right. The score must depend on the item alone: which worker gets a response,
    and in which order, is not defined.
    """

    def __init__(self, config: CallableConfig):
        self._function = import_function(KEY, config.function, "one ScoringItem")
        if isclass(self._function):
            raise ConfigurationError(
                f"{KEY}: {config.function} is a class, expected a function; env.reward.kind custom makes a"
                " reward function of it, its factory"
            )

    def score(self, item: ScoringItem) -> Score:
        """Score a response.

        Raises:
            TypeError: The function returned something else.
        """
        return as_score(KEY, self._function(item))


def as_score(key: str, result: object) -> Score:
    """Return what a function of the user's has returned as a score.

    Args:
        key: That names the function, for the error message.
        result: A number, or a dict of numbers by name, or a pair of either and a bool.
    """
    is_pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], bool | np.bool_)
    reward: Any = result[0] if isinstance(result, tuple) and is_pair else result
    says = bool(result[1]) if isinstance(result, tuple) and is_pair else None
    if _is_number(reward):
        return Score(_as_float(reward), bool(reward >= FULL_REWARD) if says is None else says)
    if _are_rewards(reward):
        first = next(iter(reward.values()))
        rewards = {name: _as_float(value) for name, value in reward.items()}
        return Score.named(rewards, is_correct=bool(first >= FULL_REWARD) if says is None else says)
    raise TypeError(
        f"{key} returned {described(result)}, expected a number, or a dict of numbers by name, or a pair of either"
        " and a bool"
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, Real | np.bool_)


def _as_float(value: Any) -> float:
    """Return a number as float; one too large for any is infinite, which `checked_score` refuses by its name."""
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
