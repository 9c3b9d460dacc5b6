# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Interface of scoring: items to score, scores, and faults."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Protocol

from nemo_rl_moe.config.suggestions import did_you_mean, nearest


@dataclass(frozen=True)
class ScoringItem:
    """One response to be scored.

    Attributes:
        prompt: The prompt as text, without the chat template's additions.
        is_truncated: Whether the response was truncated at the length limit.
        record: The data's record of the prompt (`answer`, `metadata`, ...).
        environment: Name of the prompt's environment in `env.mixture`. Empty without a mixture.
    """

    sample_id: str
    prompt: str
    response: str
    is_truncated: bool
    record: Mapping[str, Any]
    environment: str = ""


class Fault(Enum):
    """Reason why a response has no score."""

    ERROR = "error"
    TIMEOUT = "timeout"
    DIED = "died"


@dataclass(frozen=True)
class Score:
    """The score of a response.

    Attributes:
        reward: The reward, from -`LARGEST_REWARD` to `LARGEST_REWARD`. 0 if scoring failed. If there are named rewards,
            `checked_score` sets it to their weighted sum.
        fault: Reason why scoring failed. None: it did not.
        rewards: Name -> reward. Empty if the reward function returns one number.
        answer: The final answer of the response, as a text that is the same for all right answers, and for most equal
            wrong ones. Empty if the reward function reads none.
    """

    reward: float
    is_correct: bool
    fault: Fault | None = None
    message: str = ""
    rewards: Mapping[str, float] = field(default_factory=dict)
    answer: str = field(default="", compare=False)

    @classmethod
    def named(cls, rewards: Mapping[str, float], *, is_correct: bool) -> "Score":
        """Return a score with several named rewards, whose weights are in `env.reward_weights`."""
        return cls(0.0, is_correct, rewards=rewards)


LARGEST_REWARD = 1e6
"""Maximum size of a reward. With larger rewards, differences of advantages and losses would be too small for
float32."""


REWARD_KEY = "env.reward"
WEIGHTS_KEY = "env.reward_weights"


def checked_score(score: Score, weights: Mapping[str, float] | None = None) -> Score:
    """Return a score with the weighted sum of its named rewards as reward. If a reward is invalid, return reward 0 with
    the fault.

    A reward is invalid if it is NaN, infinite or too large, if its name has no weight, or if a weight has no reward.
    The driver calls this, because a reward function may change the code of the process that runs it.

    Args:
        score: Result of the reward function. A score that has been checked already is returned unchanged.
        weights: Name of a reward -> weight. None: the reward function returns one number.
    """
    if score.fault is None and (weights is not None or score.rewards):
        if weights is None or set(score.rewards) != set(weights):
            return _failed(_misnamed(score.rewards, weights))
        score = replace(score, reward=sum(weight * score.rewards[name] for name, weight in weights.items()))
    named = {f"the reward {name!r}": reward for name, reward in score.rewards.items()}
    for what, reward in {**named, "the reward": score.reward}.items():
        if not -LARGEST_REWARD <= reward <= LARGEST_REWARD:
            return _failed(_out_of_range(what, reward))
    return score


def _out_of_range(what: str, reward: float) -> str:
    return f"{what} is {reward}, expected a number from {-LARGEST_REWARD:,.0f} to {LARGEST_REWARD:,.0f}"


def _misnamed(rewards: Mapping[str, float], weights: Mapping[str, float] | None) -> str:
    """Return a description of the first difference between the names of rewards and of weights."""
    if weights is None:
        return f"rewards by name ({', '.join(map(str, rewards))}) need {WEIGHTS_KEY}, which is null"
    if not rewards:
        return f"one number as reward, expected one for each name of {WEIGHTS_KEY}: {', '.join(weights)}"
    unknown = [name for name in rewards if name not in weights]
    missing = [name for name in weights if name not in rewards]
    if unknown:
        hint = did_you_mean(nearest(str(unknown[0]), weights))
        return f"the reward {unknown[0]!r} is not in {WEIGHTS_KEY}, which names {', '.join(weights)}{hint}"
    return f"no reward {missing[0]!r}, which {WEIGHTS_KEY} names"


def _failed(problem: str) -> Score:
    return Score(0.0, is_correct=False, fault=Fault.ERROR, message=f"ValueError: {problem}")


def with_turn_rewards(score: Score, rewards: Sequence[float]) -> Score:
    """Return a checked score with the rewards of a trajectory's turns added, or a fault if the sum is too large."""
    if score.fault is not None or not rewards:
        return score
    total = score.reward + math.fsum(rewards)
    if not -LARGEST_REWARD <= total <= LARGEST_REWARD:
        return _failed(_out_of_range("the reward with those of its turns", total))
    return replace(score, reward=total)


class RewardFunction(Protocol):
    """A function that scores a response. It is made once in each reward worker, and may keep state there."""

    def score(self, item: ScoringItem) -> Score:
        """Return the score of a response. If this raises, the response has a fault instead of a score."""
        ...


class BatchReward(Protocol):
    """A reward function for many responses at once. If scoring one fails, its score has a fault. Nothing is raised."""

    def score(self, items: Sequence[ScoringItem]) -> list[Score]:
        """Return the score of each response, in order."""
        ...


class NoReward:
    """Reward function of an environment whose driver scores the trajectories. It should not be called. If it is, it
    returns a fault for every response."""

    def score(self, items: Sequence[ScoringItem]) -> list[Score]:
        return [_failed(f"{REWARD_KEY}: null scores nothing; the driver of a trajectory gives its score")] * len(items)


FAILED_SHARE = "env/failed_share"
METRIC_NAMES = {Fault.ERROR: "env/num_errors", Fault.TIMEOUT: "env/num_timeouts", Fault.DIED: "env/num_died"}


def fault_metrics(faults: Sequence[Fault | None]) -> dict[str, float]:
    """Return metrics of responses without a score: `env/num_errors`, `env/num_timeouts`, `env/num_died`,
    `env/failed_share`."""
    counts = Counter(faults)
    share = (len(faults) - counts[None]) / max(len(faults), 1)
    return {name: float(counts[fault]) for fault, name in METRIC_NAMES.items()} | {FAILED_SHARE: share}
