# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The environment of a run with agents: programs that send requests for responses to the run's endpoint."""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

from nemo_rl_moe.errors import DataError, printable
from nemo_rl_moe.rewards.interface import Fault, Score
from nemo_rl_moe.rollouts.agents.branches import TooLong
from nemo_rl_moe.rollouts.agents.requests import MOST_REPORTED, Asked, RequestSettings, TrajectoryRequests, has_ended
from nemo_rl_moe.rollouts.agents.server import EndpointServer
from nemo_rl_moe.rollouts.agents.task import AgentTask
from nemo_rl_moe.rollouts.agents.worker import AGENT_KEY
from nemo_rl_moe.rollouts.agents.worker_pool import AgentEnd, AgentRun, AgentWorkers
from nemo_rl_moe.rollouts.environment import Session
from nemo_rl_moe.rollouts.trajectory import Trajectory

_Event = AgentEnd | BaseException | Callable[[], object]
"""The end of an agent, an error, or a step that answers requests."""


class AgentEnvironment:
    """Trajectories that a program drives.

    Args:
        reward_weights: Weight of each named reward. None if a score is one number.
    """

    def __init__(
        self,
        settings: RequestSettings,
        server: EndpointServer,
        workers: AgentWorkers,
        reward_weights: Mapping[str, float] | None,
    ):
        self._settings, self._server, self._workers, self._weights = settings, server, workers, reward_weights
        self._reported: set[str] = set()

    async def rollout(self, session: Session) -> Trajectory:
        """Make one trajectory. If the agent returns no reward, the reward function scores the last response."""
        if session.model_inputs:
            raise DataError(f"{session.prompt.sample_id}: the prompt has images, expected text: agents send text alone")
        async with session.place(self._leased, self._workers.give_back) as leased:
            return await self._driven(session, leased.result())

    def _report(self, kind: str, text: str) -> None:
        """Print the first line of each kind. The run shows the output of the environment's process."""
        if kind not in self._reported and len(self._reported) < MOST_REPORTED:
            self._reported.add(kind)
            print(printable(text), flush=True)

    async def _leased(self) -> "Future[AgentRun]":
        leased = self._workers.lease()
        try:
            await asyncio.wrap_future(leased)
        except BaseException:
            self._workers.give_back(leased)
            raise
        return leased

    async def _driven(self, session: Session, agent: AgentRun) -> Trajectory:
        events: asyncio.Queue[_Event] = asyncio.Queue()
        requests = TrajectoryRequests(session, self._settings, events.put_nowait, self._report)
        loop = asyncio.get_running_loop()
        is_over = False

        def take(asked: Asked) -> None:
            if is_over:
                asked.refuse(has_ended())
            else:
                requests.take(asked)

        def ask(body: object) -> "Future[dict[str, Any]]":
            asked = Asked(body)
            try:
                loop.call_soon_threadsafe(take, asked)
            except RuntimeError:  # the loop has been closed
                asked.refuse(has_ended())
            return asked.reply

        def note(event: _Event) -> None:
            with suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(events.put_nowait, event)

        def note_end(ended: "Future[AgentEnd]") -> None:
            if not ended.cancelled():
                note(ended.exception() or ended.result())

        def unread(body: object, reply: dict[str, Any]) -> None:
            note(partial(requests.keep, Asked(body), reply))

        with self._server.session(ask, unread) as base_url:
            prompt, model = session.prompt, self._settings.rules.model
            task = AgentTask(prompt.sample_id, prompt.record, prompt.messages, base_url, self._server.key, model)
            agent.start(task).add_done_callback(note_end)
            try:
                while not isinstance(event := await events.get(), AgentEnd):
                    if isinstance(event, BaseException):
                        raise event
                    event()
            finally:
                is_over = True
                requests.close()
        return await self._finished(session, event, requests)

    async def _finished(self, session: Session, end: AgentEnd, requests: TrajectoryRequests) -> Trajectory:
        limit = requests.limit
        if end.fault is Fault.ERROR and limit:
            # Reaching a limit is no failure. With reward 0, an attempt that is too long is never better than an answer.
            if isinstance(limit, TooLong):
                session.cut_short(str(limit))
            score = Score(0.0, is_correct=False)
            if self._weights:
                score = Score.named(dict.fromkeys(self._weights, 0.0), is_correct=False)
            return session.finish(score, truncated_by=None if isinstance(limit, TooLong) else "turns")
        if end.fault is not None:
            return session.failed(end.fault, end.message)
        if not session.turns:
            reason = f"; the last one was refused: {requests.refusal}" if requests.refusal else ""
            message = f"the agent has ended without a request that the model could answer{reason}"
            return session.failed(Fault.ERROR, message)
        try:
            requests.reward(end.turn_rewards)
        except ValueError as error:
            return session.failed(Fault.ERROR, f"{AGENT_KEY} returned turn_rewards: {error}")
        return session.finish(await session.score() if end.score is None else end.score, end.metrics)
