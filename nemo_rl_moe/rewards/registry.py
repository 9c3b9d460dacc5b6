# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Construction of reward functions, and selection of the part of a response that they score."""

from collections.abc import Sequence
from dataclasses import replace

from nemo_rl_moe.config.environments.rewards import (
    CallableConfig,
    CustomRewardConfig,
    ExactConfig,
    JudgeConfig,
    MathConfig,
    ReasoningGymConfig,
    WorkerRewardConfig,
)
from nemo_rl_moe.config.schema_environment import EnvironmentConfig
from nemo_rl_moe.config.user_code import described, error_in_user_code, import_function
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.rewards.exact import ExactReward
from nemo_rl_moe.rewards.interface import RewardFunction, Score, ScoringItem
from nemo_rl_moe.rewards.judge import Judge
from nemo_rl_moe.rewards.math import MathReward
from nemo_rl_moe.rewards.reasoning_gym import ReasoningGymReward
from nemo_rl_moe.rewards.user_callable import CallableReward


class AnswerReward:
    """Reward function that passes only the answer in a response to another reward function.

    Args:
        answer_after: Text after whose last occurrence the answer begins. None: the answer is the entire response.
        score_truncated: Whether to score responses that were truncated at the length limit. If not, they are wrong and
            get reward 0.
        reward_names: Names of the rewards if the function returns several. Empty: it returns one number.
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
        if item.is_truncated and not self._score_truncated:
            return Score.named(dict.fromkeys(self._reward_names, 0.0), is_correct=False)
        return self._reward_function.score(replace(item, response=answer_in(item.response, self._answer_after)))


def answer_in(response: str, answer_after: str | None) -> str:
    """Return the text after the last `answer_after` in a response, or the entire response if `answer_after` does not
    occur or is None."""
    return response if answer_after is None else response.rpartition(answer_after)[2]


def make_reward_function(reward: WorkerRewardConfig, env: EnvironmentConfig) -> RewardFunction:
    """Return the reward function of a checked configuration."""
    names = tuple(env.reward_weights or ()) if reward.may_name_rewards else ()
    return AnswerReward(_made(reward), reward.answer_after, env.score_truncated, names)


def _made(reward: WorkerRewardConfig) -> RewardFunction:
    match reward:
        case MathConfig():
            return MathReward()
        case ExactConfig():
            return ExactReward()
        case ReasoningGymConfig():
            return ReasoningGymReward(reward)
        case CallableConfig():
            return CallableReward(reward)
        case JudgeConfig():
            return Judge(reward)
        case CustomRewardConfig():
            return _custom(reward)
    raise TypeError(f"no reward function of kind {reward.kind}")


def _custom(config: CustomRewardConfig) -> RewardFunction:
    names = [str(name) for name in config.parameters]
    takes = (
        f"env.reward.parameters ({', '.join(names)})"
        if names
        else (
            "no argument; env.reward.parameters names its arguments, and for a function that scores, set"
            " env.reward.kind=callable"
        )
    )
    key = "env.reward.factory"
    make = import_function(key, config.factory, takes, number=0, names=names)
    try:
        reward_function: RewardFunction = make(**config.parameters)
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"{key}: {config.factory} raised while making the reward function: {error_in_user_code(error)}"
        ) from error
    if not callable(getattr(reward_function, "score", None)):
        raise ConfigurationError(
            f"{key}: {config.factory} makes {described(reward_function)}, expected a reward function with a method"
            " score, which takes a ScoringItem and returns a Score; for a function that scores, set"
            " env.reward.kind=callable"
        )
    return reward_function
