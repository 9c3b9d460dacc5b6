# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Scores one response within its time, whatever the environment does to the interpreter."""

import math

from nemo_rl_moe.alarms import TimeIsUp, call_within
from nemo_rl_moe.environments.interface import Fault, Score, Scorer, ScoringItem
from nemo_rl_moe.errors import one_line


def score_within(limit_s: float, environment: Scorer, item: ScoringItem) -> Score:
    """Scores a response; a failure is a score too. Only on the main thread of a process, which gets the alarm.

    Args:
        limit_s: Seconds that the environment may take. What never comes back to the interpreter is not interrupted.
        environment: What scores.
        item: The response.

    Returns:
        The environment's score, or reward 0 with the fault: it raised, took too long, or returned no finite reward.
    """
    try:
        return call_within(limit_s, lambda: _score_or_error(environment, item))
    except TimeIsUp:
        return Score(0.0, is_correct=False, fault=Fault.TIMEOUT, message=f"took longer than {limit_s:g} s")


def _score_or_error(environment: Scorer, item: ScoringItem) -> Score:
    try:
        return _checked(environment.score(item))
    except TimeIsUp:
        raise
    except BaseException as error:  # SystemExit too: it would end the worker
        return Score(0.0, is_correct=False, fault=Fault.ERROR, message=one_line(error))


def _checked(score: Score) -> Score:
    if not isinstance(score, Score):
        raise TypeError(f"the environment returned {type(score).__name__}, expected Score")
    if not math.isfinite(score.reward):
        raise ValueError(f"the reward is {score.reward}, expected a finite number")
    return Score(float(score.reward), bool(score.is_correct))
