# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The reward worker: a process that scores its share of a batch. Each response has a time limit."""

import faulthandler
from collections.abc import Sequence

from nemo_rl_moe.alarms import TimeIsUp, interrupted_after
from nemo_rl_moe.config.environments.rewards import WorkerRewardConfig
from nemo_rl_moe.config.schema_environment import EnvironmentConfig
from nemo_rl_moe.config.user_code import error_in_user_code
from nemo_rl_moe.rewards.interface import Fault, RewardFunction, Score, ScoringItem
from nemo_rl_moe.rewards.registry import make_reward_function

INTERRUPTION_S = 1.0
"""Number of seconds after the time limit's alarm. If the reward function still runs then, its process is ended."""
_STDERR = 2


class RewardWorker:  # pragma: no cover  (runs in other processes)
    """Object in a worker process that holds a reward function and scores responses one after the other."""

    def __init__(self, rank: int, world_size: int, *, reward: WorkerRewardConfig, env: EnvironmentConfig):
        self._reward_function = make_reward_function(reward, env)
        self._timeout_s = reward.timeout_s

    def score(self, items: Sequence[ScoringItem]) -> list[Score]:
        """Return the score of each response, in order.

        If the alarm cannot interrupt the code, such as a loop in C or a library that uses the alarm itself, this
        process is ended, and the driver replaces it. The traceback is in Ray's log of the worker.
        """
        scores = []
        try:
            for item in items:
                # A thread of faulthandler ends the process even if the interpreter is blocked.
                faulthandler.dump_traceback_later(self._timeout_s + INTERRUPTION_S, exit=True, file=_STDERR)
                scores.append(score_within(self._timeout_s, self._reward_function, item))
        finally:
            faulthandler.cancel_dump_traceback_later()
        return scores


def score_within(limit_s: float, reward_function: RewardFunction, item: ScoringItem) -> Score:
    """Return the score of a response, or reward 0 with the fault if scoring fails. Only works in the main thread.

    Args:
        limit_s: Maximum number of seconds of the reward function. Code that never returns to the interpreter is not
            interrupted.
    """
    try:
        with interrupted_after(limit_s):
            return _score_or_error(reward_function, item)
    except TimeIsUp:
        return Score(0.0, is_correct=False, fault=Fault.TIMEOUT, message=f"took longer than {limit_s:g} s")


def _score_or_error(reward_function: RewardFunction, item: ScoringItem) -> Score:
    try:
        return reward_function.score(item)
    except TimeIsUp:
        raise
    except BaseException as error:  # also SystemExit, which would end the worker
        return Score(0.0, is_correct=False, fault=Fault.ERROR, message=error_in_user_code(error))
