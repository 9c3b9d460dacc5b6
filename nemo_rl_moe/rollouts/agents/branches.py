# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The conversations in the requests of a trajectory: each continues an earlier one or begins a sequence."""

from dataclasses import dataclass

from nemo_rl_moe.data.continuation import Continuation, Extension, SampledTurn
from nemo_rl_moe.data.encoding import most_characters, num_characters
from nemo_rl_moe.data.messages import Message
from nemo_rl_moe.data.template_inputs import TemplateInputs, ToolDefinition
from nemo_rl_moe.data.turn_glue import NoExtension
from nemo_rl_moe.endpoint.chat_requests import ChatRequest, MessageKey, key_of
from nemo_rl_moe.generation.interface import TokenIds
from nemo_rl_moe.rollouts.environment import Session
from nemo_rl_moe.rollouts.growing_sequence import GrowingSequence
from nemo_rl_moe.rollouts.turn import SampledResponse

_REASONING = "reasoning_content"


@dataclass(frozen=True)
class _Response:
    """A response, with the conversation up to it.

    Attributes:
        keys: Keys of all messages, the response included. They have no thinking, which many clients do not send back.
        reasoning: Thinking of the response, if the agent got it separately.
        prompted: The messages before the response, with their tokens.
        sequence: The sequence with the response. The tokens of the response end before index `size`.
    """

    keys: tuple[MessageKey, ...]
    reasoning: str | None
    tools: tuple[ToolDefinition, ...]
    prompted: Extension
    token_ids: TokenIds
    sequence: GrowingSequence
    size: int


@dataclass(frozen=True)
class Place:
    """The tokens that the response to a request continues.

    Attributes:
        token_ids: They end in the generation prompt.
        prompted: The messages before the response, with their tokens.
        earlier: The last response among the messages. None if the request begins a conversation.
    """

    request: ChatRequest
    token_ids: TokenIds
    prompted: Extension
    earlier: _Response | None = None


class TooLong(Exception):
    """A request leaves no room for a response."""


class Branches:
    """All responses of a trajectory, by the messages before them.

    A request that repeats the messages up to a response and adds further ones continues that response. Tokens of
    earlier messages are never rendered again. If other tokens already follow the response, another sequence begins with
    a copy of the tokens up to the response. The copied tokens are not trained on again. Any other request begins a
    sequence with a rendering of its messages.
    """

    def __init__(self, session: Session, continuation: Continuation):
        self._session, self._continuation = session, continuation
        self._responses: list[_Response] = []

    def place(self, request: ChatRequest) -> Place:
        """Return the tokens that the response to a request continues. Nothing changes.

        Raises:
            TooLong: A response would have no room.
            NoExtension: There is no chat template, or a message has the text of a control token that cannot be
                tokenized as plain text.
            RecordError: The chat template does not show the messages.
        """
        number, limit = num_characters((request.messages, request.tools)), self._session.max_tokens
        if number > most_characters(limit):
            raise TooLong(
                f"messages and tools have {number:,} characters, so no response fits into the limit of {limit:,}"
                " tokens (policy.max_total_sequence_length)"
            )
        earlier = self._earlier(request)
        if earlier is not None:
            try:
                return self._after(earlier, request)
            except NoExtension:
                pass  # the template now renders earlier messages differently, as it may drop thinking
        extension = self._continuation.begin(request.messages, TemplateInputs(request.tools or None))
        self._require_room(0, extension)
        return Place(request, extension.token_ids, extension)

    def add(self, place: Place, message: Message, sampled: SampledResponse) -> None:
        """Add a response to a sequence, so that later requests can continue it.

        If other tokens already follow the earlier response, another sequence begins.

        Args:
            place: Result of `place` for the request.
            message: The response as the agent gets it.
        """
        request, earlier, session = place.request, place.earlier, self._session
        if earlier is not None and len(earlier.sequence) == earlier.size:
            sequence = earlier.sequence
            session.extend_sequence(sequence, place.prompted.token_ids, request.messages[len(earlier.keys) :])
        else:
            sequence = session.begin_sequence(place.token_ids, request.messages)
        session.add_sampled(sequence, sampled)
        keys = (*map(key_of, request.messages), key_of(message))
        reasoning, token_ids = message.get(_REASONING), sampled.turn.token_ids
        response = _Response(keys, reasoning, request.tools, place.prompted, token_ids, sequence, len(sequence))
        self._responses.append(response)

    def _earlier(self, request: ChatRequest) -> _Response | None:
        """Return the last response among the messages of a request, if it is known.

        Of several with the same text, it is the one with the same thinking, or the newest.
        """
        keys = tuple(map(key_of, request.messages))
        size = next((index for index in range(len(keys), 0, -1) if keys[index - 1][0] == "assistant"), 0)
        known = [each for each in self._responses if each.keys == keys[:size] and each.tools == request.tools]
        reasoning = request.messages[size - 1].get(_REASONING)
        return max(reversed(known), key=lambda each: each.reasoning == reasoning, default=None)

    def _after(self, earlier: _Response, request: ChatRequest) -> Place:
        prompted, session = earlier.prompted, self._session
        inputs, stops = TemplateInputs(request.tools or None), session.sampling.stop_token_ids
        turn = SampledTurn(prompted.messages, earlier.token_ids, stops, inputs, prompted.text)
        extension = self._continuation.extend(turn, request.messages[len(earlier.keys) :])
        self._require_room(earlier.size, extension)
        token_ids = (*earlier.sequence.token_ids[: earlier.size], *extension.token_ids)
        return Place(request, token_ids, extension, earlier)

    def _require_room(self, size_before: int, extension: Extension) -> None:
        size, limit = size_before + len(extension.token_ids), self._session.max_tokens
        if size >= limit:
            raise TooLong(
                f"the messages have {size:,} tokens, so no response fits into the limit of {limit:,}"
                " (policy.max_total_sequence_length)"
            )
