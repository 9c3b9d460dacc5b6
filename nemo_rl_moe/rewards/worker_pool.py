# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Pool of reward workers. Workers that die are replaced."""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Self

from nemo_rl_moe.config.environments.rewards import WorkerRewardConfig
from nemo_rl_moe.config.schema_environment import EnvironmentConfig
from nemo_rl_moe.distributed.worker_pool import Lost, WorkerPool
from nemo_rl_moe.rewards.interface import Fault, Score, ScoringItem, checked_score
from nemo_rl_moe.rewards.worker import INTERRUPTION_S, RewardWorker

LONGEST_MESSAGE = 300
Indices = tuple[int, ...]


class RewardWorkers:
    """Context manager that starts processes to score responses. Ray must be running.

    For a batch, each worker is called once with its share of the responses. The worker returns a fault for a response
    whose scoring raises or exceeds the time limit. If a response ends its worker (by a segmentation fault, `os._exit`
    or lack of memory) or blocks it outside of the interpreter, the worker is replaced, and the responses of its share
    are scored again one by one, each at most twice.

    Scores do not depend on which worker scores a response, unless the reward function keeps state.
    """

    def __init__(self, reward: WorkerRewardConfig, env: EnvironmentConfig):
        self._config, self._env = reward, env
        self._pool = WorkerPool("reward worker", partial(RewardWorker, reward=reward, env=env), reward.num_workers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    def score(self, items: Sequence[ScoringItem]) -> list[Score]:
        """Return the score of each response, in order. If scoring fails, the score is 0 with the fault. Several threads
        may call this."""
        try:
            return self._score(items)
        except CancelledError:
            raise self._pool.stopped() from None
        except BaseException:
            self.shutdown()
            raise

    def shutdown(self) -> None:
        """Stop all workers, even if other threads wait for their scores. A second call has no effect."""
        self._pool.shutdown()

    def _score(self, items: Sequence[ScoringItem]) -> list[Score]:
        scores: dict[int, Score] = {}
        shares = _shares(len(items), self._config.num_workers)
        asked = deque((share, self._ask(items, share), False) for share in shares)
        while asked:
            share, future, is_retry = asked.popleft()
            found = future.result()
            if not isinstance(found, Lost):
                scores.update(zip(share, map(self._checked, found), strict=True))
            elif is_retry and not found.was_before:
                scores[share[0]] = self._fault(found)
            else:
                asked.extend(((index,), self._ask(items, (index,)), True) for index in share)
        return [scores[index] for index in range(len(items))]

    def _ask(self, items: Sequence[ScoringItem], share: Indices) -> "Future[list[Score] | Lost]":
        limit_s = len(share) * (self._config.timeout_s + INTERRUPTION_S)
        return self._pool.submit(limit_s, RewardWorker.score, [items[index] for index in share])

    def _checked(self, score: Score) -> Score:
        # Built-in reward functions return one number, even if trajectories have several rewards.
        return checked_score(score, self._env.reward_weights if self._config.may_name_rewards else None)

    def _fault(self, lost: Lost) -> Score:
        limit_s = self._config.timeout_s
        if lost.seconds >= limit_s:
            message = f"took longer than {limit_s:g} s and could not be interrupted"
            return Score(0.0, is_correct=False, fault=Fault.TIMEOUT, message=message)
        message = f"its worker died: {lost.reason}"[:LONGEST_MESSAGE]
        return Score(0.0, is_correct=False, fault=Fault.DIED, message=message)


def _shares(num_items: int, num_workers: int) -> list[Indices]:
    """Return the indices of the responses in each worker's share. Shares are equal, and neighbours, such as the
    responses to one prompt, go to different workers."""
    shares = (tuple(range(worker, num_items, num_workers)) for worker in range(num_workers))
    return [share for share in shares if share]
