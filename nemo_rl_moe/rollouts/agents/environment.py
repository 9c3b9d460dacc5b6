# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The environment of a run with agents: programs that send requests for responses to the run's endpoint."""

import asyncio
import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from nemo_rl_moe.data.messages import Message
from nemo_rl_moe.data.record_values import RecordError
from nemo_rl_moe.data.thinking import THINK_START, Thinking
from nemo_rl_moe.data.turn_glue import NoExtension
from nemo_rl_moe.endpoint.chat_requests import RequestRules
from nemo_rl_moe.endpoint.replies import chat_choice, chat_reply, message_of, read_turn, without_thinking
from nemo_rl_moe.endpoint.request_error import RequestError
from nemo_rl_moe.errors import DataError, printable
from nemo_rl_moe.rewards.interface import Fault, Score
from nemo_rl_moe.rollouts.agents.branches import Branches, TooLong
from nemo_rl_moe.rollouts.agents.server import EndpointServer
from nemo_rl_moe.rollouts.agents.task import AgentTask
from nemo_rl_moe.rollouts.agents.worker_pool import AgentEnd, AgentRun, AgentWorkers
from nemo_rl_moe.rollouts.environment import Session
from nemo_rl_moe.rollouts.trajectory import Trajectory
from nemo_rl_moe.rollouts.wire_calls import CallMetrics, WireCalls
from nemo_rl_moe.tools.formats.interface import ToolFormat

REFUSED = "agent/refused_requests"
OTHER_SAMPLING = "agent/other_sampling_requests"
CALL_METRICS = CallMetrics("agent/tool_calls", "agent/malformed_calls", "agent/failed_calls", "agent/unknown_calls")

MOST_REPORTED = 20
"""Most refusals in the transcript of a trajectory, and most kinds of them on the console."""


@dataclass
class _Asked:
    """A request that waits for its reply. The reply is cancelled if the client disconnects."""

    body: object
    reply: "Future[dict[str, Any]]" = field(default_factory=Future)


@dataclass(frozen=True)
class _Unread:
    """A reply that its client has not read."""

    body: object
    reply: dict[str, Any]


_Event = _Asked | _Unread | AgentEnd | BaseException


class AgentEnvironment:
    """Trajectories that a program drives. The requests of a trajectory are answered one after the other.

    Args:
        tool_format: Format in which the model writes calls. None without tools.
        max_turns: Maximum number of responses of a trajectory. Further requests are refused.
        reward_weights: Weight of each named reward. None if a score is one number.
        thinking: Marks of the model's thinking, which replies have as `reasoning_content`. None if it has none.
    """

    def __init__(
        self,
        rules: RequestRules,
        tool_format: ToolFormat | None,
        max_turns: int,
        server: EndpointServer,
        workers: AgentWorkers,
        reward_weights: Mapping[str, float] | None,
        thinking: Thinking | None = None,
    ):
        self._rules, self._format, self._max_turns, self._thinking = rules, tool_format, max_turns, thinking
        self._server, self._workers, self._weights = server, workers, reward_weights
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
        talk = _Talk(session, self._rules, self._format, self._max_turns, self._thinking, self._report)
        events: asyncio.Queue[_Event] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        is_over = False

        def take(event: _Event) -> None:
            if not is_over:
                events.put_nowait(event)
            elif isinstance(event, _Asked):
                _refuse(event, _has_ended())

        def note(event: _Event) -> None:
            try:
                loop.call_soon_threadsafe(take, event)
            except RuntimeError:  # the loop has been closed
                if isinstance(event, _Asked):
                    _refuse(event, _has_ended())

        def note_end(ended: "Future[AgentEnd]") -> None:
            if not ended.cancelled():
                note(ended.exception() or ended.result())

        def ask(body: object) -> "Future[dict[str, Any]]":
            asked = _Asked(body)
            note(asked)
            return asked.reply

        with self._server.session(ask, lambda body, reply: note(_Unread(body, reply))) as base_url:
            prompt = session.prompt
            task = AgentTask(
                prompt.sample_id, prompt.record, prompt.messages, base_url, self._server.key, self._rules.model
            )
            agent.start(task).add_done_callback(note_end)
            try:
                while True:
                    event = await events.get()
                    if isinstance(event, BaseException):
                        raise event
                    if isinstance(event, AgentEnd):
                        break
                    if isinstance(event, _Unread):
                        talk.keep(event)
                    else:
                        await talk.answer(event)
            finally:
                is_over = True
                while not events.empty():
                    take(events.get_nowait())
        return await self._finished(session, event, talk)

    async def _finished(self, session: Session, end: AgentEnd, talk: "_Talk") -> Trajectory:
        limit = talk.limit
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
            reason = f"; the last one was refused: {talk.refusal}" if talk.refusal else ""
            message = f"the agent has ended without a request that the model could answer{reason}"
            return session.failed(Fault.ERROR, message)
        return session.finish(await session.score() if end.score is None else end.score, end.metrics)


class _Talk:
    """The requests of one trajectory.

    Attributes:
        limit: The last refusal because of a limit of the run. None if a later request was accepted.
        refusal: The last refusal.
    """

    def __init__(
        self,
        session: Session,
        rules: RequestRules,
        tool_format: ToolFormat | None,
        max_turns: int,
        thinking: Thinking | None,
        report: Callable[[str, str], None],
    ):
        assert session.continuation is not None, "checked before anything starts"
        self._session, self._rules, self._format, self._max_turns = session, rules, tool_format, max_turns
        self._thinking, self._report = thinking, report
        self._branches = Branches(session, session.continuation)
        self._unread: dict[str, dict[str, Any]] = {}
        self._calls = WireCalls(session, CALL_METRICS)
        session.metrics.update(dict.fromkeys((REFUSED, OTHER_SAMPLING), 0.0))
        self.limit: Exception | None = None
        self.refusal: RequestError | None = None

    async def answer(self, asked: _Asked) -> None:
        """Answer a request, unless its client has disconnected."""
        if asked.reply.cancelled():
            return
        try:
            reply = await self._reply(asked.body)
        except RequestError as error:
            self._note_refusal(error)
            _refuse(asked, error)
            return
        except BaseException:  # such as the end of the trajectory
            _refuse(asked, _has_ended())
            raise
        if asked.reply.set_running_or_notify_cancel():
            asked.reply.set_result(reply)
        else:
            self.keep(_Unread(asked.body, reply))

    def _note_refusal(self, error: RequestError) -> None:
        self.refusal = error
        self._session.metrics[REFUSED] += 1
        if self._session.metrics[REFUSED] <= MOST_REPORTED:
            self._session.note(f"request refused: {error}")
        sample = self._session.prompt.sample_id
        self._report(
            f"refused {error.parameter or error.code}",
            f"a request is refused: {error} (sample {sample}); further ones are counted as {REFUSED}",
        )

    def keep(self, unread: _Unread) -> None:
        """Keep a reply for a client that repeats its request, as clients do after a timeout."""
        self._unread[_text_of(unread.body)] = unread.reply

    async def _reply(self, body: object) -> dict[str, Any]:
        if self._unread and (unread := self._unread.pop(_text_of(body), None)) is not None:
            return unread
        session = self._session
        request = self._rules.parse(body)
        session.metrics[OTHER_SAMPLING] += bool(request.differences)
        for difference in request.differences:
            self._report(
                difference.partition(":")[0],
                f"{difference}; the run's is used (env.driver.agent_requests: run), and further ones are counted as"
                f" {OTHER_SAMPLING}",
            )
        self._calls.note_results(request.messages)
        if len(session.turns) >= self._max_turns:
            self.limit = RequestError(
                f"the trajectory has {self._max_turns} responses, the maximum (env.driver.max_turns)"
            )
            raise self.limit
        try:
            place = self._branches.place(request)
        except TooLong as error:
            self.limit = error
            raise RequestError(str(error), code="context_length_exceeded", parameter="messages") from None
        except (NoExtension, RecordError) as error:
            raise RequestError(str(error), parameter="messages") from None
        self.limit = None
        prompt_ids = list(place.sequence.token_ids)
        begins_in_thinking = session.ends_in(THINK_START, place.sequence)
        is_opened = self._thinking is not None and session.ends_in(self._thinking.start, place.sequence)
        room = session.max_tokens - len(prompt_ids)
        turn = await session.continue_sequence(place.sequence, room, request.max_tokens)
        read = read_turn(turn.text, request, self._format, begins_in_thinking=begins_in_thinking)
        read = without_thinking(read, self._thinking, is_opened=is_opened)
        message: Message = message_of(read, int(session.metrics[CALL_METRICS.made]))
        ids = [call["id"] for call in message.get("tool_calls", ())]
        self._calls.note(zip(ids, read.calls, strict=True), read.num_malformed)
        self._branches.add(place, message, turn.token_ids)
        name = f"{session.group_id}-{len(session.turns)}"
        sampled = turn.token_ids
        choice = chat_choice(request, message, sampled, turn.logprobs, session.decode, is_cut=turn.is_cut)
        return chat_reply(request, [choice], prompt_ids, len(sampled), name=name, model=self._rules.model)


def _has_ended() -> RequestError:
    return RequestError("the trajectory has ended", status=404, code="session_not_found")


def _refuse(asked: _Asked, error: RequestError) -> None:
    if asked.reply.set_running_or_notify_cancel():
        asked.reply.set_exception(error)


def _text_of(body: object) -> str:
    return json.dumps(body, sort_keys=True)
