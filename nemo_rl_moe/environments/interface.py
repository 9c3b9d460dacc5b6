# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Scoring of responses: items, scores, faults."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol


@dataclass(frozen=True)
class ScoringItem:
    """One response to be scored.

    Attributes:
        sample_id: Where the prompt came from.
        prompt: The prompt as text, without what a chat template adds.
        response: The response as text, without the end token.
        is_truncated: The response was cut at the length limit before its end.
        record: Whatever the data say of the prompt (`answer`, `metadata`, ...).
    """

    sample_id: str
    prompt: str
    response: str
    is_truncated: bool
    record: Mapping[str, Any]


class Fault(Enum):
    """Reason for a missing score."""

    ERROR = "error"
    TIMEOUT = "timeout"
    DIED = "died"


@dataclass(frozen=True)
class Score:
    """Score of a response.

    Attributes:
        reward: At most `LARGEST_REWARD` in size; 0 where the environment failed.
        is_correct: Whether it counts as right in `accuracy`.
        fault: Why there is no score; None for a score.
        message: What went wrong, in one line; empty for a score.
    """

    reward: float
    is_correct: bool
    fault: Fault | None = None
    message: str = ""


LARGEST_REWARD = 1e6
"""Largest size of a reward: the float32 of advantages and losses has few digits left for differences beyond."""


def checked_score(score: Score) -> Score:
    """A score, or reward 0 with the fault where its reward is NaN, infinite or too large.

    For the driver: in the environment's own process a reward function may have changed what would check it.
    """
    if -LARGEST_REWARD <= score.reward <= LARGEST_REWARD:
        return score
    expected = f"a number from {-LARGEST_REWARD:,.0f} to {LARGEST_REWARD:,.0f}"
    message = f"ValueError: the reward is {score.reward}, expected {expected}"
    return Score(0.0, is_correct=False, fault=Fault.ERROR, message=message)


class Scorer(Protocol):
    """Scores one response at a time; made once in each environment worker, and may keep state there."""

    def score(self, item: ScoringItem) -> Score:
        """Scores a response. May raise: the sample then gets reward 0 and is counted as a fault."""
        ...


class BatchScorer(Protocol):
    """Scores many responses at once; faults are told and never raised."""

    def score(self, items: Sequence[ScoringItem]) -> list[Score]:
        """One score for each response, in their order."""
        ...


METRIC_NAMES = {Fault.ERROR: "env/num_errors", Fault.TIMEOUT: "env/num_timeouts", Fault.DIED: "env/num_died"}


def fault_metrics(faults: Sequence[Fault | None]) -> dict[str, float]:
    """`env/num_errors`, `env/num_timeouts` and `env/num_died`: trajectories that got reward 0 for want of a score."""
    counts = Counter(faults)
    return {name: float(counts[fault]) for fault, name in METRIC_NAMES.items()}
