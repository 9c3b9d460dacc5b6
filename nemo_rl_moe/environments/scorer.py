# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Scores many responses in a pool of worker processes, and outlives whatever happens in them."""

import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import RayActorError, RayError

from nemo_rl_moe.config.schema_grpo import EnvironmentConfig
from nemo_rl_moe.distributed.worker_group import exit_reason, outcome
from nemo_rl_moe.distributed.worker_process import WorkerFailure, WorkerProcess
from nemo_rl_moe.environments.interface import Fault, Score, ScoringItem
from nemo_rl_moe.environments.worker import LONGEST_HOLD_S, EnvironmentWorker
from nemo_rl_moe.errors import WorkerDiedError

START_TIMEOUT_S = 300.0
CALL_SLACK_S = 30.0
"""What a call may take beyond the time of its responses, before its worker is taken for dead."""
LONGEST_MESSAGE = 300
WORKER_ENVIRONMENT = {
    # The policy workers have the cores and the GPUs.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
}


@dataclass(frozen=True)
class _Share:
    """Responses that one call scores.

    Attributes:
        indices: Which.
        is_on_trial: It is one response, of a share whose worker was lost: if the next one is lost too, it is its fault.
    """

    indices: tuple[int, ...]
    is_on_trial: bool = False


@dataclass(frozen=True)
class _Call:
    """What a worker is doing.

    Attributes:
        worker: Its number.
        share: What it scores; None while it starts.
        sign_of_life: A call that it answers before it begins with the share, where that is on trial.
        started_at: Seconds, by the monotonic clock.
        deadline: When the worker is taken for dead.
    """

    worker: int
    share: _Share | None
    sign_of_life: Any
    started_at: float
    deadline: float


class EnvironmentScorer:
    """A pool of environment workers; a context manager. Ray must be running.

    In the good case a batch is one call to each worker. A response that raises or takes too long is told by its worker.
    One that takes its worker with it, or does not let go of it, costs the worker: it is replaced, and the responses of
    its share are scored again one by one, so that the others get their scores. The time for a batch is bounded: each
    response is tried twice at most.

    Scores do not depend on how responses are shared among workers, unless the environment remembers earlier ones.

    Args:
        config: The environment and the number of workers. They take no place from the policy workers.

    Raises:
        WorkerDiedError: An environment cannot be made in its worker; carries the worker's own error.
    """

    def __init__(self, config: EnvironmentConfig):
        self._config = config
        self._actors: dict[int, Any] = {}
        self._calls: dict[Any, _Call] = {}
        self._idle: list[int] = []
        search_path = [str(Path(folder).absolute()) for folder in sys.path]
        self._start_arguments = (
            WORKER_ENVIRONMENT,
            search_path,
            cloudpickle.dumps((EnvironmentWorker, {"config": config})),
        )
        try:
            for worker in range(config.num_workers):
                self._start(worker)
            while self._calls:
                for call in self._wait():
                    self._finish_start(call, self._calls.pop(call))
        except BaseException:
            self.shutdown()
            raise

    def __enter__(self) -> "EnvironmentScorer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def score(self, items: Sequence[ScoringItem]) -> list[Score]:
        """One score for each response, in their order; where the environment failed, reward 0 with the fault.

        Raises:
            WorkerDiedError: A worker was lost, and the environment cannot be made again; or all have been stopped.
        """
        if not self._actors:
            raise WorkerDiedError("cannot score: the environment workers have been stopped")
        try:
            return self._score(items)
        except BaseException:
            self.shutdown()  # calls of this batch must not be taken for those of a later one
            raise

    def shutdown(self) -> None:
        """Stops all workers. Does nothing the second time."""
        actors, self._actors = self._actors, {}
        self._calls.clear()
        for actor in actors.values():
            _kill(actor)

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
                    scores.update(zip(doing.share.indices, result, strict=True))
                else:
                    self._start(doing.worker)
                    self._give_up(doing, result, waiting, scores)
        return [scores[index] for index in range(len(items))]

    def _start(self, worker: int) -> None:
        """Starts a worker, in place of an earlier one with its number."""
        if worker in self._actors:
            _kill(self._actors[worker])
        actor_class = ray.remote(WorkerProcess)
        actor = actor_class.options(num_cpus=0, num_gpus=0, max_restarts=0, scheduling_strategy="SPREAD").remote()
        self._actors[worker] = actor
        call = actor.start.remote(*self._start_arguments, worker, self._config.num_workers)
        now = time.monotonic()
        self._calls[call] = _Call(worker, None, None, now, now + START_TIMEOUT_S)

    def _send(self, items: Sequence[ScoringItem], share: _Share) -> None:
        worker = self._idle.pop()
        allowed_s = len(share.indices) * (self._config.timeout_s + LONGEST_HOLD_S) + CALL_SLACK_S
        actor = self._actors[worker]
        sign_of_life = actor.place.remote() if share.is_on_trial else None
        call = actor.call.remote("score", [items[index] for index in share.indices])
        now = time.monotonic()
        self._calls[call] = _Call(worker, share, sign_of_life, now, now + allowed_s)

    def _wait(self) -> list[Any]:
        """Waits until a call has ended, or its time has; kills the worker of a call that is overdue, which ends it."""
        next_deadline = min(doing.deadline for doing in self._calls.values())
        ready, _ = ray.wait(list(self._calls), num_returns=1, timeout=max(0.0, next_deadline - time.monotonic()))
        if ready:
            return list(ready)
        overdue = [call for call, doing in self._calls.items() if doing.deadline <= time.monotonic()]
        for call in overdue:
            _kill(self._actors[self._calls[call].worker])
        return overdue

    def _finish_start(self, call: Any, doing: _Call) -> None:
        result = outcome(call)
        if result is None:
            self._idle.append(doing.worker)
            return
        name = f"environment worker {doing.worker}"
        if isinstance(result, WorkerFailure):
            raise WorkerDiedError(f"{name} {result.summary} while starting:\n{result.details}")
        if time.monotonic() >= doing.deadline:
            raise WorkerDiedError(f"{name} did not start within {START_TIMEOUT_S:g} s")
        raise WorkerDiedError(f"{name} died while starting:\n{_reason(result)}")

    def _give_up(self, doing: _Call, result: Any, waiting: deque[_Share], scores: dict[int, Score]) -> None:
        """Has the responses of a lost worker scored one by one, or holds the one that was alone to be guilty."""
        assert doing.share is not None
        if not doing.share.is_on_trial:
            waiting.extend(_Share((index,), is_on_trial=True) for index in doing.share.indices)
            return
        if isinstance(outcome(doing.sign_of_life), RayError):  # the worker had been lost before
            waiting.append(doing.share)
            return
        (index,) = doing.share.indices
        limit_s = self._config.timeout_s
        if time.monotonic() - doing.started_at >= limit_s:
            message = f"took longer than {limit_s:g} s and could not be interrupted"
            scores[index] = Score(0.0, is_correct=False, fault=Fault.TIMEOUT, message=message)
        else:
            message = f"its worker died: {_reason(result)}"[:LONGEST_MESSAGE]
            scores[index] = Score(0.0, is_correct=False, fault=Fault.DIED, message=message)


def _shares(num_items: int, num_workers: int) -> list[_Share]:
    """An equal share for each worker; the responses to one prompt, which take about as long, go to different ones."""
    shares = (_Share(tuple(range(worker, num_items, num_workers))) for worker in range(num_workers))
    return [share for share in shares if share.indices]


def _kill(actor: Any) -> None:
    # Ray has been stopped, or the actor has died, if it cannot be killed.
    with suppress(RayError, ValueError):
        if ray.is_initialized():
            ray.kill(actor, no_restart=True)


def _reason(result: Any) -> str:
    if isinstance(result, WorkerFailure):
        return result.details
    return exit_reason(result) if isinstance(result, RayActorError) else " ".join(str(result).split())
