# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Registry of reward functions, and the part of a response that is scored, the same for all of them."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from nemo_rl_moe.config.schema_environment import EnvironmentConfig
from nemo_rl_moe.config.user_code import described, error_in_user_code, import_function, is_custom
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.rewards.exact import ExactReward
from nemo_rl_moe.rewards.interface import RewardFunction, Score, ScoringItem
from nemo_rl_moe.rewards.math import MathReward
from nemo_rl_moe.rewards.reasoning_gym import ReasoningGymReward
from nemo_rl_moe.rewards.user_callable import CallableReward


class AnswerReward:
    """Reward function that passes only the answer of a response on to another one.

    Args:
        answer_after: The answer is the text after the last of these, or the whole response without it; None: always the
            whole response.
        score_truncated: Score responses that were truncated at the length limit; otherwise they are wrong, with reward
            0.
        reward_names: Names of its rewards, where it gives several.
    """

    def __init__(
        self,
        reward_function: RewardFunction,
        answer_after: str | None,
        score_truncated: bool,
        reward_names: Sequence[str] = (),
    ):
        self._reward_function = reward_function
        self._reward_names = reward_names
        self._answer_after = answer_after
        self._score_truncated = score_truncated

    def score(self, item: ScoringItem) -> Score:
        """Score the answer in a response."""
        if item.is_truncated and not self._score_truncated:
            return Score.named(dict.fromkeys(self._reward_names, 0.0), is_correct=False)
        return self._reward_function.score(replace(item, response=answer_in(item.response, self._answer_after)))


def answer_in(response: str, answer_after: str | None) -> str:
    """Return the text after the last `answer_after`; the whole response where it is missing or None."""
    return response if answer_after is None else response.rpartition(answer_after)[2]


def make_reward_function(config: EnvironmentConfig) -> RewardFunction:
    """Make the reward function that a checked configuration describes.

    Raises:
        ConfigurationError: A library, a task, a parameter, a module or a function is missing or wrong.
    """
    reward_function = _make_custom(config) if is_custom(config.name) else REWARD_FUNCTIONS[config.name](config)
    names = tuple(config.reward_weights or ()) if config.is_custom else ()
    return AnswerReward(reward_function, config.answer_after, config.score_truncated, names)


def _make_custom(config: EnvironmentConfig) -> RewardFunction:
    """Return a reward function of the user's own: what a class or a function makes of `env.parameters`."""
    names = [str(name) for name in config.parameters]
    takes = (
        f"env.parameters ({', '.join(names)})"
        if names
        else ("no argument; env.parameters names its arguments, and a function that scores is env.name callable")
    )
    make = import_function("env.name", config.name, takes, number=0, names=names)
    try:
        reward_function: RewardFunction = make(**config.parameters)
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"env.name: {config.name} raised while it was made: {error_in_user_code(error)}"
        ) from error
    if not callable(getattr(reward_function, "score", None)):
        raise ConfigurationError(
            f"env.name: {config.name} makes {described(reward_function)}, expected a reward function with a method"
            " score, which takes a ScoringItem and returns a Score; a function that scores is env.name callable"
        )
    return reward_function


def _make_reasoning_gym(config: EnvironmentConfig) -> RewardFunction:
    assert config.reasoning_gym is not None  # a rule of the configuration
    return ReasoningGymReward(config.reasoning_gym)


def _make_callable(config: EnvironmentConfig) -> RewardFunction:
    assert config.callable is not None
    return CallableReward(config.callable)


REWARD_FUNCTIONS: dict[str, Callable[[EnvironmentConfig], RewardFunction]] = {
    "exact": lambda config: ExactReward(),
    "math": lambda config: MathReward(),
    "reasoning_gym": _make_reasoning_gym,
    "callable": _make_callable,
}
