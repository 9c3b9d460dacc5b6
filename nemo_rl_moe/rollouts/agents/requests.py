# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The requests of an agent's trajectory, which may overlap, and their replies."""

import asyncio
import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from nemo_rl_moe.config.suggestions import did_you_mean, nearest, shortened
from nemo_rl_moe.data.messages import Message
from nemo_rl_moe.data.record_values import RecordError
from nemo_rl_moe.data.thinking import THINK_START, Thinking
from nemo_rl_moe.data.turn_glue import NoExtension
from nemo_rl_moe.endpoint.chat_requests import RequestRules
from nemo_rl_moe.endpoint.replies import chat_choice, chat_reply, message_of, read_turn, without_thinking
from nemo_rl_moe.endpoint.request_error import RequestError
from nemo_rl_moe.rollouts.agents.branches import Branches, Place, TooLong
from nemo_rl_moe.rollouts.environment import Session
from nemo_rl_moe.rollouts.turn import SampledResponse
from nemo_rl_moe.rollouts.wire_calls import CallMetrics, WireCalls
from nemo_rl_moe.tools.formats.interface import ToolFormat

REFUSED = "agent/refused_requests"
OTHER_SAMPLING = "agent/other_sampling_requests"
CALL_METRICS = CallMetrics("agent/tool_calls", "agent/malformed_calls", "agent/failed_calls", "agent/unknown_calls")

MOST_REPORTED = 20
"""Most refusals in the transcript of a trajectory, and most kinds of them on the console."""
GATHER_S = 0.05
"""Seconds without a further request after which an engine in lockstep gets the requests of a trajectory."""


@dataclass(eq=False)
class Asked:
    """A request that waits for its reply. The reply is cancelled if the client disconnects."""

    body: object
    reply: "Future[dict[str, Any]]" = field(default_factory=Future)

    @cached_property
    def text(self) -> str:
        """A text that is equal for equal requests."""
        return json.dumps(self.body, sort_keys=True)

    def refuse(self, error: RequestError) -> None:
        """Give the error as the reply, unless the client has disconnected."""
        if self.reply.running() or self.reply.set_running_or_notify_cancel():
            self.reply.set_exception(error)


@dataclass(frozen=True)
class RequestSettings:
    """Settings with which an environment answers the requests of agents.

    Attributes:
        tool_format: Format in which the model writes calls. None without tools.
        max_turns: Maximum number of responses of a trajectory. Further requests are refused.
        thinking: Marks of the model's thinking, which replies have as `reasoning_content`. None if it has none.
        gather_s: Seconds for which the first of several requests waits for the next one. They are then sorted by their
            text, so that their order does not depend on time.
    """

    rules: RequestRules
    tool_format: ToolFormat | None
    max_turns: int
    thinking: Thinking | None = None
    gather_s: float = 0.0


class TrajectoryRequests:
    """The requests of one trajectory. They are answered as the engine answers them, maybe several at a time.

    A response belongs to the trajectory as soon as its client takes it. If the client has disconnected, the response
    is kept for a client that repeats the request.

    Args:
        post: Takes functions to call soon, in the trajectory's own code.
        report: Takes a kind and a line about a request.

    Attributes:
        limit: The last refusal because of a limit of the run. None if a later request was accepted.
        refusal: The last refusal.
    """

    def __init__(
        self,
        session: Session,
        settings: RequestSettings,
        post: Callable[[Callable[[], object]], object],
        report: Callable[[str, str], None],
    ):
        assert session.continuation is not None, "checked before anything starts"
        self._session, self._settings, self._post, self._report = session, settings, post, report
        self._branches = Branches(session, session.continuation)
        self._turns: dict[str, int] = {}
        self._unread: dict[str, dict[str, Any]] = {}
        self._missed: dict[str, SampledResponse] = {}
        self._arrived: list[Asked] = []
        self._timer: asyncio.TimerHandle | None = None
        self._sampling: dict[asyncio.Task[SampledResponse], Asked] = {}
        self._calls = WireCalls(session, CALL_METRICS)
        session.metrics.update(dict.fromkeys((REFUSED, OTHER_SAMPLING), 0.0))
        self.limit: Exception | None = None
        self.refusal: RequestError | None = None

    def take(self, asked: Asked) -> None:
        """Answer a request soon, together with others that arrive at the same time."""
        for other in (*self._arrived, *self._sampling.values()):
            if other.text == asked.text and other.reply.cancelled():  # the client has timed out, and asks again
                other.reply = asked.reply
                return
        self._arrived.append(asked)
        if self._timer is not None:
            self._timer.cancel()
        loop, gather_s = asyncio.get_running_loop(), self._settings.gather_s
        self._timer = loop.call_later(gather_s, self._post, self._answer_arrived)

    def keep(self, asked: Asked, reply: dict[str, Any]) -> None:
        """Keep a reply that its client has not read for a client that repeats the request."""
        self._unread[asked.text] = reply

    def reward(self, rewards: Mapping[str, float]) -> None:
        """Give rewards to responses, by the ids of their replies.

        Raises:
            ValueError: An id is unknown, or a reward is no number or too large.
        """
        for name, amount in rewards.items():
            if name not in self._turns:
                hint = did_you_mean(nearest(name, self._turns))
                raise ValueError(f"got {shortened(name)!r}, expected the id of a reply of this trajectory{hint}")
            self._session.reward(amount, self._turns[name])

    def close(self) -> None:
        """Refuse all requests that have no reply yet."""
        if self._timer is not None:
            self._timer.cancel()
        for task in self._sampling:
            task.cancel()
        for asked in (*self._arrived, *self._sampling.values()):
            asked.refuse(has_ended())

    def _answer_arrived(self) -> None:
        arrived, self._arrived = self._arrived, []
        for asked in sorted(arrived, key=lambda each: each.text):
            if not asked.reply.cancelled():
                self._begin(asked)

    def _begin(self, asked: Asked) -> None:
        """Ask the model for the response to a request, unless there is one already."""
        if (reply := self._unread.get(asked.text)) is not None:
            if self._give(asked, lambda: reply):
                del self._unread[asked.text]
            return
        try:
            place = self._place(asked.body)
        except RequestError as error:
            self._note_refusal(error)
            asked.refuse(error)
            return
        except BaseException:
            asked.refuse(has_ended())
            raise
        missed = self._missed.get(asked.text)
        if missed is not None and missed.prompt_ids == place.token_ids:
            if self._give(asked, lambda: self._added(place, missed)):
                del self._missed[asked.text]
            return
        sampling = self._session.sample(place.token_ids, place.request.max_tokens)
        task = asyncio.get_running_loop().create_task(sampling)
        self._sampling[task] = asked
        task.add_done_callback(lambda task: self._post(partial(self._end, task, place)))

    def _end(self, task: "asyncio.Task[SampledResponse]", place: Place) -> None:
        """Reply to a request that the model has answered."""
        asked = self._sampling.pop(task)
        try:
            sampled = task.result()
        except BaseException:  # such as the end of the trajectory
            asked.refuse(has_ended())
            raise
        if not self._give(asked, lambda: self._added(place, sampled)):
            self._missed[asked.text] = sampled

    def _give(self, asked: Asked, make: Callable[[], dict[str, Any]]) -> bool:
        """Make the reply to a request and return True, unless its client has disconnected."""
        if not asked.reply.set_running_or_notify_cancel():
            return False
        try:
            asked.reply.set_result(make())
        except BaseException:
            asked.refuse(has_ended())
            raise
        return True

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

    def _place(self, body: object) -> Place:
        session, max_turns = self._session, self._settings.max_turns
        request = self._settings.rules.parse(body)
        session.metrics[OTHER_SAMPLING] += bool(request.differences)
        for difference in request.differences:
            self._report(
                difference.partition(":")[0],
                f"{difference}; the run's is used (env.driver.agent_requests: run), and further ones are counted as"
                f" {OTHER_SAMPLING}",
            )
        self._calls.note_results(request.messages)
        if len(session.turns) + len(self._sampling) >= max_turns:
            self.limit = RequestError(f"the trajectory has {max_turns} responses, the maximum (env.driver.max_turns)")
            raise self.limit
        try:
            place = self._branches.place(request)
        except TooLong as error:
            self.limit = error
            raise RequestError(str(error), code="context_length_exceeded", parameter="messages") from None
        except (NoExtension, RecordError) as error:
            raise RequestError(str(error), parameter="messages") from None
        self.limit = None
        return place

    def _added(self, place: Place, sampled: SampledResponse) -> dict[str, Any]:
        """Add a response to the trajectory, and return the reply with it."""
        session, settings, request, turn = self._session, self._settings, place.request, sampled.turn
        begins_in_thinking = session.ends_in(THINK_START, place.token_ids)
        is_opened = settings.thinking is not None and session.ends_in(settings.thinking.start, place.token_ids)
        read = read_turn(turn.text, request, settings.tool_format, begins_in_thinking=begins_in_thinking)
        read = without_thinking(read, settings.thinking, is_opened=is_opened)
        message: Message = message_of(read, int(session.metrics[CALL_METRICS.made]))
        self._branches.add(place, message, sampled)
        ids = [call["id"] for call in message.get("tool_calls", ())]
        self._calls.note(zip(ids, read.calls, strict=True), read.num_malformed)
        name = f"{session.group_id}-{len(session.turns)}"
        self._turns[name] = len(session.turns) - 1
        choice = chat_choice(request, message, turn.token_ids, turn.logprobs, session.decode, is_cut=turn.is_cut)
        model, num_sampled = settings.rules.model, len(turn.token_ids)
        return chat_reply(request, [choice], place.token_ids, num_sampled, name=name, model=model)


def has_ended() -> RequestError:
    """Return the error for a request whose trajectory has ended."""
    return RequestError("the trajectory has ended", status=404, code="session_not_found")
