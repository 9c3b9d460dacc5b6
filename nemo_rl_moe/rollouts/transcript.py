# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Transcript of a session for people to read: texts of its turns, with their tokens and times."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from nemo_rl_moe.data.messages import Message
from nemo_rl_moe.data.prompts import Prompt
from nemo_rl_moe.rollouts.growing_sequence import GrowingSequence
from nemo_rl_moe.runs.folder.conversations import ConversationTurn, Outcome, RolloutTimes, Span, ToolUse

PROMPT, ENVIRONMENT, ASSISTANT = "prompt", "environment", "assistant"
_IMAGE = "[image]"


class Transcript:
    """Turns of a trajectory while it grows.

    Tokens that the environment adds without a text are decoded.

    Args:
        sequence: The sequence that begins with the prompt.
        clock: Returns seconds of a monotonic clock.
    """

    def __init__(
        self,
        prompt: Prompt,
        sequence: GrowingSequence,
        decode: Callable[[Sequence[int]], str],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._decode, self._clock, self._began_s = decode, clock, clock()
        tokens = (0, len(prompt.token_ids))
        as_text = _Placed(ConversationTurn(PROMPT, prompt.text, 0, tokens), sequence)
        self._turns = _placed(prompt.messages, sequence, tokens) or [as_text]
        self._num_prompt_turns = len(self._turns)
        self._answers = range(0)
        self._last_response: int | None = None
        self._generation: list[Span] = []
        self._tools: list[Span] = []
        self._places: dict[str, _PlaceOfCall] = {}

    def now_s(self) -> float:
        return self._clock() - self._began_s

    def add_messages(self, messages: Sequence[Message], sequence: GrowingSequence, first: int) -> None:
        """Add messages whose tokens are in `sequence` from index `first` on."""
        self._answers = range(0)
        self._turns += _placed(messages, sequence, (first, len(sequence)))

    def add_response(self, text: str, sequence: GrowingSequence, start: int, asked_s: float, waited_s: float) -> None:
        """Add a response of the model that has arrived now.

        Args:
            sequence: Its tokens from index `start` on are the response.
            asked_s: Time of the request, in seconds since the start.
            waited_s: Seconds after the request in which no engine worked on it.
        """
        now_s = self.now_s()
        if (known := self._end_of(sequence)) < start:
            self._add(ENVIRONMENT, self._decode(sequence.token_ids[known:start]), sequence, (known, start))
        self._last_response, self._answers = len(self._turns), range(0)
        self._add(ASSISTANT, text, sequence, (start, len(sequence)))
        self._generation.append((min(asked_s + waited_s, now_s), now_s))

    def add_given(self, text: str, sequence: GrowingSequence | None) -> None:
        """Add text of the environment that is no message, at the end of a sequence (None if the text did not fit)."""
        self._answers = range(0)
        tokens = (0, 0) if sequence is None else (self._end_of(sequence), len(sequence))
        self._add(ENVIRONMENT, text, sequence, tokens)

    def answer(self, messages: Sequence[Message], sequence: GrowingSequence, first: int) -> None:
        """Replace the messages that answer the last response by `messages`, whose tokens begin at index `first`."""
        start = self._answers.start if self._answers else len(self._turns)
        turns = _placed(messages, sequence, (first, len(sequence)))
        self._turns[start : start + len(self._answers)] = turns
        self._answers = range(start, start + len(turns))

    def add_unread(self, messages: Sequence[Mapping[str, object]]) -> None:
        """Add messages that the model does not get, as they do not fit or the chat template cannot show them."""
        self._turns += _placed(messages, None, (0, 0))

    def add_call(self, call: ToolUse, seconds: float) -> None:
        """Add a tool call of the last response, which began `seconds` ago."""
        if self._last_response is None:
            return
        calls = self._turns[self._last_response].turn.calls
        if call.call_id:
            self._places[call.call_id] = _PlaceOfCall(self._last_response, len(calls), len(self._tools))
        self._set_calls(self._last_response, (*calls, call))
        now_s = self.now_s()
        self._tools.append((max(0.0, now_s - seconds), now_s))

    def add_result(self, call_id: str, outcome: Outcome) -> None:
        """Add the outcome of an earlier tool call. Called when the result of the call arrives."""
        place = self._places.get(call_id)
        if place is None:
            return
        calls = list(self._turns[place.turn].turn.calls)
        calls[place.call] = replace(calls[place.call], outcome=outcome)
        self._set_calls(place.turn, calls)
        self._tools[place.span] = self._tools[place.span][0], self.now_s()

    def _set_calls(self, turn: int, calls: Sequence[ToolUse]) -> None:
        placed = self._turns[turn]
        self._turns[turn] = replace(placed, turn=replace(placed.turn, calls=tuple(calls)))

    def conversation(self, kept: Sequence[GrowingSequence]) -> tuple[ConversationTurn, ...]:
        """Return the turns so far.

        Args:
            kept: Sequences of the trajectory. Turns in other sequences count as unread. The prompt's turns are only
                included if its sequence is kept.
        """
        numbers = {id(sequence): number for number, sequence in enumerate(kept)}
        first = self._turns[0].sequence
        shown = self._turns if id(first) in numbers else self._turns[self._num_prompt_turns :]
        return tuple(_numbered(placed.turn, numbers.get(id(placed.sequence))) for placed in shown)

    def _add(self, role: str, text: str, sequence: GrowingSequence | None, tokens: tuple[int, int]) -> None:
        turn = ConversationTurn(role, text, 0, tokens, is_sampled=role == ASSISTANT)
        self._turns.append(_Placed(turn, sequence))

    def _end_of(self, sequence: GrowingSequence) -> int:
        """Return the number of tokens of a sequence that the turns so far cover."""
        return max((placed.turn.tokens[1] for placed in self._turns if placed.sequence is sequence), default=0)

    def times(self) -> RolloutTimes:
        """Return the seconds so far, with the times of generation and of tools."""
        return RolloutTimes(self.now_s(), tuple(self._generation), tuple(self._tools))


@dataclass(frozen=True)
class _PlaceOfCall:
    """Indices of a call: its turn, its position among the calls of that turn, and its time span."""

    turn: int
    call: int
    span: int


@dataclass(frozen=True)
class _Placed:
    """A turn, and the sequence with its tokens. The sequence is None if the model has not read the turn."""

    turn: ConversationTurn
    sequence: GrowingSequence | None


def _placed(
    messages: Sequence[Mapping[str, object]], sequence: GrowingSequence | None, tokens: tuple[int, int]
) -> list[_Placed]:
    return [_Placed(_of_message(message, tokens), sequence) for message in messages]


def _numbered(turn: ConversationTurn, sequence: int | None) -> ConversationTurn:
    return replace(turn, sequence=sequence, tokens=turn.tokens if sequence is not None else (0, 0))


def _of_message(message: Mapping[str, object], tokens: tuple[int, int]) -> ConversationTurn:
    return ConversationTurn(
        role=str(message.get("role", "")),
        text=_text_of(message.get("content")) + _calls_of(message.get("tool_calls")),
        sequence=None,
        tokens=tokens,
        name=_name(message.get("name")),
        call_id=_name(message.get("tool_call_id")),
    )


def _name(value: object) -> str:
    return value if isinstance(value, str) else ""


def _calls_of(calls: object) -> str:
    """Return the calls of a message that was not sampled, each on its own line."""
    functions = [call.get("function") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    return "".join(f"\n{each.get('name')} {each.get('arguments')}" for each in functions if isinstance(each, dict))


def _text_of(content: object) -> str:
    """Return the text of a message, with images as `[image]`."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(str(part.get("text", _IMAGE)) for part in parts if isinstance(part, dict))
