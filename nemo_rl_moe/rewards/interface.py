# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Scoring of responses: items, scores, faults."""

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
        prompt: As text, without what a chat template adds.
        is_truncated: The response was truncated at the length limit before its end.
        record: Whatever the data say of the prompt (`answer`, `metadata`, ...).
        environment: Name in `env.mixture`; empty where a run has one environment.
    """

    sample_id: str
    prompt: str
    response: str
    is_truncated: bool
    record: Mapping[str, Any]
    environment: str = ""


class Fault(Enum):
    """Reason for a missing score."""

    ERROR = "error"
    TIMEOUT = "timeout"
    DIED = "died"


@dataclass(frozen=True)
class Score:
    """Score of a response.

    Attributes:
        reward: At most `LARGEST_REWARD` in size; 0 where scoring failed. Of named rewards their weighted sum,
            which `checked_score` puts there.
        fault: Why there is no score; None for a score.
        rewards: Several rewards by name; empty where the reward function gives one number.
    """

    reward: float
    is_correct: bool
    fault: Fault | None = None
    message: str = ""
    rewards: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def named(cls, rewards: Mapping[str, float], *, is_correct: bool) -> "Score":
        """Return the score of several rewards by name, which `env.reward_weights` weighs."""
        return cls(0.0, is_correct, rewards=rewards)


LARGEST_REWARD = 1e6
"""Largest size of a reward: the float32 of advantages and losses has few digits left for differences beyond."""


REWARD_KEY = "env.reward"
WEIGHTS_KEY = "env.reward_weights"


def checked_score(score: Score, weights: Mapping[str, float] | None = None) -> Score:
    """Return a score with the weighted sum of its named rewards as reward; or reward 0 with the fault.

    A fault is a reward that is NaN, infinite or too large, a name without a weight, or a weight without its reward.
    For the driver: in its own process a reward function may have changed what would check it.

    Args:
        score: As the reward function gave it; one that has been checked stays as it is.
        weights: Weight of each named reward; None where the reward function gives one number.
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
    """Return the difference of the names of rewards from those of weights, in words."""
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
    """Return a score that has been checked with the rewards of turns added to it, or the fault of a sum too large."""
    if score.fault is not None or not rewards:
        return score
    total = score.reward + math.fsum(rewards)
    if not -LARGEST_REWARD <= total <= LARGEST_REWARD:
        return _failed(_out_of_range("the reward with those of its turns", total))
    return replace(score, reward=total)


class RewardFunction(Protocol):
    """Function that scores a response; made once in each reward worker, and may keep state there."""

    def score(self, item: ScoringItem) -> Score:
        """Score a response. May raise: the sample then has a fault in place of a score."""
        ...


class BatchReward(Protocol):
    """Reward function of many responses at once; faults are reported and never raised."""

    def score(self, items: Sequence[ScoringItem]) -> list[Score]:
        """Return one score for each response, in their order."""
        ...


class NoReward:
    """Reward function of a run whose driver scores its trajectories itself: nothing else is scored."""

    def score(self, items: Sequence[ScoringItem]) -> list[Score]:
        """Fail each response, for which code of the user's has asked."""
        return [_failed(f"{REWARD_KEY}: null scores nothing; the driver of a trajectory gives its score")] * len(items)


FAILED_SHARE = "env/failed_share"
METRIC_NAMES = {Fault.ERROR: "env/num_errors", Fault.TIMEOUT: "env/num_timeouts", Fault.DIED: "env/num_died"}


def fault_metrics(faults: Sequence[Fault | None]) -> dict[str, float]:
    """Count responses without a score: `env/num_errors`, `env/num_timeouts`, `env/num_died`, `env/failed_share`."""
    counts = Counter(faults)
    share = (len(faults) - counts[None]) / max(len(faults), 1)
    return {name: float(counts[fault]) for fault, name in METRIC_NAMES.items()} | {FAILED_SHARE: share}
