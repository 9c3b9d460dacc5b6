# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A Python function of the user's own as environment."""

import inspect
from collections.abc import Callable
from numbers import Real
from typing import Any

import numpy as np

from nemo_rl_moe.config.schema_grpo import CallableConfig
from nemo_rl_moe.config.user_code import described, import_attribute
from nemo_rl_moe.environments.interface import Score, ScoringItem
from nemo_rl_moe.errors import ConfigurationError

KEY = "env.callable.function"
FULL_REWARD = 1.0


class CallableEnvironment:
    """Scores a response with a function of a `ScoringItem`.

    The function returns a reward, a number; a response is then right when its reward is 1 or more. Or it returns a pair
    of a reward and a bool that says whether the response is right. The score must depend on the item alone: which
    worker gets a response, and in which order, is not defined.

    Args:
        config: Names the function.

    Raises:
        ConfigurationError: There is no such function.
    """

    def __init__(self, config: CallableConfig):
        self._function = find_function(config.function)

    def score(self, item: ScoringItem) -> Score:
        """Scores a response.

        Raises:
            TypeError: The function returned something else.
        """
        result = self._function(item)
        if _is_number(result):
            return Score(float(result), is_correct=bool(result >= FULL_REWARD))
        if isinstance(result, tuple) and len(result) == 2:
            reward, is_correct = result
            if _is_number(reward) and isinstance(is_correct, bool | np.bool_):
                return Score(float(reward), bool(is_correct))
        raise TypeError(f"{KEY} returned {described(result)}, expected a number, or a pair of a number and a bool")


def find_function(name: str) -> Callable[[ScoringItem], Any]:
    """Imports what `package.module:function` names. The working folder is searched too, after all else.

    Raises:
        ConfigurationError: There is no such module or function, or it does not take one argument.
    """
    found = import_attribute(KEY, name)
    _require_usable(found, name)
    function: Callable[[ScoringItem], Any] = found
    return function


def _require_usable(found: Any, name: str) -> None:
    if not callable(found):
        raise ConfigurationError(f"{KEY}: {name} is {described(found)}, expected a function")
    if inspect.iscoroutinefunction(found) or inspect.isgeneratorfunction(found):
        raise ConfigurationError(f"{KEY}: {name} is a coroutine or a generator, expected a function that returns")
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):  # some that are written in C have none
        return
    try:
        signature.bind(object())
    except TypeError as error:
        raise ConfigurationError(f"{KEY}: {name}{signature} cannot be called with one ScoringItem: {error}") from None


def _is_number(value: Any) -> bool:
    return isinstance(value, Real | np.bool_)
