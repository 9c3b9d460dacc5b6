# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Matching of full message histories, which other libraries send with each request, to a session's sequences."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress

from nemo_rl_moe.data.messages import Message, content_text
from nemo_rl_moe.data.thinking import THINK_START
from nemo_rl_moe.rollouts.environment import Session
from nemo_rl_moe.rollouts.turn import Turn

_Known = tuple[str, str, tuple[tuple[str, str], ...]]


class MessageHistory:
    """The conversation of a session, for code that sends all messages with each request.

    If the messages continue the conversation, its sequence grows, and sampled tokens stay exactly as they are.
    Otherwise another sequence begins.

    Args:
        session: Session of the trajectory. No other code may add messages to it.

    Attributes:
        begins_in_thinking: Whether the prompt of the last response has opened a think block.
    """

    def __init__(self, session: Session):
        self._session = session
        self._known = [_known(message) for message in session.prompt.messages]
        self._has_answered = False
        self.begins_in_thinking = False

    async def respond(self, messages: Sequence[Message]) -> Turn:
        """Return the model's response to messages.

        Raises:
            TrajectoryFull: The messages do not fit.
            NoExtension: The chat template cannot show the messages.
        """
        sent = [_known(message) for message in messages]
        new = list(messages[len(self._known) :])
        if sent[: len(self._known)] != self._known or not self._may_follow(new):
            self._session.begin_conversation(messages)
        elif new:
            self._session.append_messages(new)
        if not self._session.has_room:
            raise TrajectoryFull
        self._known = sent
        self.begins_in_thinking = self._session.ends_in(THINK_START)
        return await self._session.generate()

    def note_response(self, message: Message) -> None:
        """Remember the last response as the message that the caller's code gets.

        The code sends this message back in its next request, so `respond` can recognize the continued conversation.
        """
        self._known.append(_known(message))
        self._has_answered = True

    def _may_follow(self, new: Sequence[Message]) -> bool:
        if not self._has_answered:
            return not new
        return bool(new) and all(message.get("role") != "assistant" for message in new)


class TrajectoryFull(Exception):
    """Messages do not fit into the trajectory."""


def _known(message: Mapping[str, object]) -> _Known:
    """Return a key that is equal for equal messages."""
    content, calls = message.get("content"), message.get("tool_calls")
    return (
        str(message.get("role")),
        content_text(content if isinstance(content, str | list) else None),
        tuple(_known_call(call) for call in (calls if isinstance(calls, list) else ())),
    )


def _known_call(call: object) -> tuple[str, str]:
    function = call.get("function", call) if isinstance(call, Mapping) else {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError):
            arguments = json.loads(arguments)
    return str(function.get("name")), json.dumps(arguments, sort_keys=True, default=str)
