# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Pool of reward workers (Ray actors) that scores many responses and survives the loss of a worker."""

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import ray
from ray.exceptions import RayError

from nemo_rl_moe.config.environments.rewards import WorkerRewardConfig
from nemo_rl_moe.config.schema_environment import EnvironmentConfig
from nemo_rl_moe.distributed.light_workers import (
    CALL_SLACK_S,
    START_TIMEOUT_S,
    LightWorkers,
    check_start,
    kill,
    reason_of_end,
)
from nemo_rl_moe.distributed.worker_group import outcome
from nemo_rl_moe.errors import WorkerDiedError
from nemo_rl_moe.rewards.interface import Fault, Score, ScoringItem, checked_score
from nemo_rl_moe.rewards.worker import INTERRUPTION_S, RewardWorker

LONGEST_MESSAGE = 300

_STOPPED = "cannot score: the reward workers have been stopped"


@dataclass(frozen=True)
class _Share:
    """Responses that one call scores.

    Attributes:
        is_retry: A single response of a share whose worker was lost. If its worker is lost too, it gets the fault.
    """

    indices: tuple[int, ...]
    is_retry: bool = False


@dataclass(frozen=True)
class _Call:
    """A running call of a worker.

    Attributes:
        share: The responses that it scores; None while it starts.
        ping: Of a retry: a call that the worker answers before it scores. If that failed too, the worker had been lost
            before (killed from outside between two calls) and the response is not at fault.
        deadline: Time at which the worker is taken for dead.
    """

    worker: int
    share: _Share | None
    ping: Any
    started_at: float
    deadline: float


class RewardWorkers:
    """Pool of reward workers; a context manager. Ray must be running.

    A batch is one call to each worker, which reports responses that raise or exceed their time limit. Where a response
    ends its worker (a segmentation fault, `os._exit`, memory) or blocks it outside of the interpreter, the worker is
    replaced, and its responses are scored again one by one: each is scored twice at most.

    Scores do not depend on how responses are shared among workers, unless the reward function keeps state.

    Args:
        reward: Its workers take no place from the policy workers.
        env: Section of the environment.

    Raises:
        WorkerDiedError: A reward function cannot be made in its worker; carries the worker's own error.
    """

    def __init__(self, reward: WorkerRewardConfig, env: EnvironmentConfig):
        self._config, self._env = reward, env
        self._actors: dict[int, Any] = {}
        self._calls: dict[Any, _Call] = {}
        self._idle: list[int] = []
        self._is_stopped, self._in_use = False, threading.Lock()
        self._workers = LightWorkers(partial(RewardWorker, reward=reward, env=env), reward.num_workers)
        try:
            for worker in range(reward.num_workers):
                self._start(worker)
            while self._calls:
                for call in self._wait():
                    self._finish_start(call, self._calls.pop(call))
        except BaseException:
            self.shutdown()
            raise

    def __enter__(self) -> "RewardWorkers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def score(self, items: Sequence[ScoringItem]) -> list[Score]:
        """Score each response, in their order; where scoring failed, reward 0 with the fault.

        Another thread, such as that of asynchronous rollouts during a validation, waits meanwhile.

        Raises:
            WorkerDiedError: A worker was lost, and the reward function cannot be made again; or all have been stopped.
        """
        try:
            with self._in_use:
                if self._is_stopped:
                    raise WorkerDiedError(_STOPPED)
                return self._score(items)
        except BaseException as error:
            if self._is_stopped and isinstance(error, Exception):  # meanwhile, by another thread
                raise WorkerDiedError(_STOPPED) from None
            self.shutdown()  # calls of this batch must not be taken for those of a later one
            raise

    def shutdown(self) -> None:
        """Stop all workers, and so what another thread scores. Does nothing the second time."""
        self._is_stopped = True
        actors, self._actors = self._actors, {}
        self._calls.clear()
        for actor in actors.values():
            kill(actor)

    def _score(self, items: Sequence[ScoringItem]) -> list[Score]:
        scores: dict[int, Score] = {}
        waiting = deque(_shares(len(items), self._config.num_workers))
        while len(scores) < len(items):
            while waiting and self._idle:
                self._send(items, waiting.popleft())
            for call in self._wait():
                doing = self._calls.pop(call)
                if doing.share is None:
                    self._finish_start(call, doing)
                    continue
                result = outcome(call)
                if isinstance(result, list):
                    self._idle.append(doing.worker)
                    # Reward functions of this project give one number, also within a rollout that gives several.
                    weights = self._env.reward_weights if self._config.may_name_rewards else None
                    checked = (checked_score(score, weights) for score in result)
                    scores.update(zip(doing.share.indices, checked, strict=True))
                else:
                    self._start(doing.worker)
                    self._retry_or_fail(doing, result, waiting, scores)
        return [scores[index] for index in range(len(items))]

    def _start(self, worker: int) -> None:
        """Start a worker, in place of an earlier one with its number."""
        if self._is_stopped:
            raise WorkerDiedError(_STOPPED)
        if worker in self._actors:
            kill(self._actors[worker])
        self._actors[worker], call = self._workers.start(worker)
        now = time.monotonic()
        self._calls[call] = _Call(worker, None, None, now, now + START_TIMEOUT_S)

    def _send(self, items: Sequence[ScoringItem], share: _Share) -> None:
        worker = self._idle.pop()
        allowed_s = len(share.indices) * (self._config.timeout_s + INTERRUPTION_S) + CALL_SLACK_S
        actor = self._actors[worker]
        ping = actor.place.remote() if share.is_retry else None
        call = actor.call.remote(allowed_s, RewardWorker.score, [items[index] for index in share.indices])
        now = time.monotonic()
        self._calls[call] = _Call(worker, share, ping, now, now + allowed_s)

    def _wait(self) -> list[Any]:
        """Wait until a call has ended, or its time has; kill the worker of a call that is overdue, which ends it."""
        next_deadline = min(doing.deadline for doing in self._calls.values())
        ready, _ = ray.wait(list(self._calls), num_returns=1, timeout=max(0.0, next_deadline - time.monotonic()))
        if ready:
            return list(ready)
        overdue = [call for call, doing in self._calls.items() if doing.deadline <= time.monotonic()]
        for call in overdue:
            kill(self._actors[self._calls[call].worker])
        return overdue

    def _finish_start(self, call: Any, doing: _Call) -> None:
        check_start(f"reward worker {doing.worker}", outcome(call), doing.deadline)
        self._idle.append(doing.worker)

    def _retry_or_fail(self, doing: _Call, result: Any, waiting: deque[_Share], scores: dict[int, Score]) -> None:
        """Queue the responses of a lost worker to be scored one by one; a retried one gets the fault."""
        assert doing.share is not None
        if not doing.share.is_retry:
            waiting.extend(_Share((index,), is_retry=True) for index in doing.share.indices)
            return
        if isinstance(outcome(doing.ping), RayError):  # the worker had been lost before
            waiting.append(doing.share)
            return
        (index,) = doing.share.indices
        limit_s = self._config.timeout_s
        if time.monotonic() - doing.started_at >= limit_s:
            message = f"took longer than {limit_s:g} s and could not be interrupted"
            scores[index] = Score(0.0, is_correct=False, fault=Fault.TIMEOUT, message=message)
        else:
            message = f"its worker died: {reason_of_end(result)}"[:LONGEST_MESSAGE]
            scores[index] = Score(0.0, is_correct=False, fault=Fault.DIED, message=message)


def _shares(num_items: int, num_workers: int) -> list[_Share]:
    """Return an equal share for each worker; the responses to one prompt go to different ones."""
    shares = (_Share(tuple(range(worker, num_items, num_workers))) for worker in range(num_workers))
    return [share for share in shares if share.indices]
