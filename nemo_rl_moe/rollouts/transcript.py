# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Transcript of a session: who said what, in which tokens, and when, for those who read the trajectory."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from nemo_rl_moe.data.messages import Message
from nemo_rl_moe.data.prompts import Prompt
from nemo_rl_moe.runs.folder.conversations import ConversationTurn, RolloutTimes, Span, ToolUse

PROMPT, ENVIRONMENT, ASSISTANT = "prompt", "environment", "assistant"
_IMAGE = "[image]"


class Transcript:
    """Turns of a trajectory while it grows. Texts are those of its messages and responses, and no copies.

    Args:
        prompt: What it begins with.
        clock: Seconds on a clock that only goes forward.
    """

    def __init__(self, prompt: Prompt, clock: Callable[[], float] = time.monotonic):
        self._clock, self._began_s = clock, clock()
        tokens = (0, len(prompt.token_ids))
        self._turns = [_of_message(message, 0, tokens) for message in prompt.messages]
        if not self._turns:
            self._turns = [ConversationTurn(PROMPT, prompt.text, 0, tokens)]
        self._answers = range(0)
        self._last_response: int | None = None
        self._generation: list[Span] = []
        self._tools: list[Span] = []

    def now_s(self) -> float:
        """Return the seconds since its start."""
        return self._clock() - self._began_s

    def add_response(self, text: str, sequence: int, tokens: tuple[int, int], asked_s: float, waited_s: float) -> None:
        """Add a response of the model, which is there now.

        Args:
            asked_s: When it was asked for, in seconds since the start.
            waited_s: Seconds from then on in which no engine worked on it.
        """
        now_s = self.now_s()
        self._last_response, self._answers = len(self._turns), range(0)
        self._turns.append(ConversationTurn(ASSISTANT, text, sequence, tokens, is_sampled=True))
        self._generation.append((min(asked_s + waited_s, now_s), now_s))

    def add_given(self, text: str, sequence: int | None, tokens: tuple[int, int]) -> None:
        """Add tokens of the environment that are no message."""
        self._answers = range(0)
        self._turns.append(ConversationTurn(ENVIRONMENT, text, sequence, tokens))

    def answer(self, messages: Sequence[Message], sequence: int, tokens: tuple[int, int]) -> None:
        """Take the messages that answer a response, in place of those that did so far."""
        start = self._answers.start if self._answers else len(self._turns)
        turns = [_of_message(message, sequence, tokens) for message in messages]
        self._turns[start : start + len(self._answers)] = turns
        self._answers = range(start, start + len(turns))

    def add_unread(self, messages: Sequence[Mapping[str, object]]) -> None:
        """Add messages that the model cannot read, as they do not fit or the chat template cannot show them."""
        self._turns += [_of_message(message, None, (0, 0)) for message in messages]

    def add_call(self, call: ToolUse, seconds: float) -> None:
        """Note a call in the last response, which is over now and took so many seconds."""
        if self._last_response is None:
            return
        turn = self._turns[self._last_response]
        self._turns[self._last_response] = replace(turn, calls=(*turn.calls, call))
        now_s = self.now_s()
        self._tools.append((max(0.0, now_s - seconds), now_s))

    def conversation(self, num_sequences: int) -> tuple[ConversationTurn, ...]:
        """Return the turns so far.

        Args:
            num_sequences: Sequences that the trajectory keeps; what stands in later ones the model has not read.
        """
        return tuple(
            turn
            if turn.sequence is None or turn.sequence < num_sequences
            else replace(turn, sequence=None, tokens=(0, 0))
            for turn in self._turns
        )

    def times(self) -> RolloutTimes:
        """Return what it did when."""
        return RolloutTimes(self.now_s(), tuple(self._generation), tuple(self._tools))


def _of_message(message: Mapping[str, object], sequence: int | None, tokens: tuple[int, int]) -> ConversationTurn:
    return ConversationTurn(
        role=str(message.get("role", "")),
        text=_text_of(message.get("content")),
        sequence=sequence,
        tokens=tokens,
        name=_name(message.get("name")),
        call_id=_name(message.get("tool_call_id")),
    )


def _name(value: object) -> str:
    return value if isinstance(value, str) else ""


def _text_of(content: object) -> str:
    """Return the text of a message, images as `[image]`."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(str(part.get("text", _IMAGE)) for part in parts if isinstance(part, dict))
