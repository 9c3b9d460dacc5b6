# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Glue of a chat template: the text that it puts after the content of a turn, found in a conversation of one question.

A stand-in replaces the turn, in the forms that a turn of the model may have.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

from nemo_rl_moe.data.control_tokens import ControlTokens, content_spans
from nemo_rl_moe.data.left_out import THINKING_KEYS
from nemo_rl_moe.data.messages import Message
from nemo_rl_moe.data.template_inputs import TemplateInputs
from nemo_rl_moe.data.turn_spans import RenderError, Span

StandIn = Callable[[str], Message]
"""Makes a turn of the model that contains a text."""
THOUGHT_MARK = "thought-pv31"
Render = Callable[[Sequence[Message], TemplateInputs], str]
"""Renders messages with the generation prompt. Raises `Refusal`."""
_MARKS = ("stand-in-qx7", "another-zk94")
CONTENT_MARK = "content-hj58"
_QUESTION: Message = {"role": "user", "content": "q"}
_CALL_ID = "abcdefghi"  # some templates want ids of nine letters and digits


class NoExtension(ValueError):
    """No tokens are known that continue a conversation without changing it. The message is the reason."""


class Refusal(NoExtension):
    """The chat template refuses a conversation."""


class OtherEnd(NoExtension):
    """The template ends a turn with another token than the model if a turn follows."""


class Rewritten(NoExtension):
    """The chat template renders the conversation so far in another way once messages follow."""


@dataclass(frozen=True)
class Glue:
    """Text after the content of a turn.

    Attributes:
        text: End token of the turn, glue, messages and the next generation prompt.
        end: Id of the end token.
        plain: Pieces of the text in which control tokens are plain text.
    """

    text: str
    end: int
    plain: tuple[Span, ...]


class GlueFinder:
    """Finds glue. Checks that depend on the template and the roles of messages alone are done once."""

    def __init__(self, render: Render, controls: ControlTokens | None):
        self._render, self._controls = render, controls
        self._ends: dict[tuple[object, ...], int] = {}

    def find(
        self, form: int, stand_in: StandIn, new: Sequence[Message], inputs: TemplateInputs, ends: Mapping[str, int]
    ) -> Glue:
        """Return the text after a turn's content if these messages follow.

        Args:
            form: Index of the stand-in in `stand_ins`.
            ends: Tokens that end the model's turns, by their texts.

        Raises:
            NoExtension: The text depends on the turn's content, has no end token, or lacks a message.
        """

        def behind(messages: Sequence[Message], mark: str = _MARKS[0]) -> str:
            _, found, tail = self._render([_QUESTION, stand_in(mark), *messages], inputs).partition(mark)
            if not found or mark in tail:
                raise NoExtension("the chat template does not show the text of a turn once")
            return tail

        key = form, bool(inputs.tools), *ends, *(message["role"] for message in new)
        tail = behind(new)
        if key not in self._ends:
            if behind(new, _MARKS[1]) != tail:
                raise NoExtension("what the chat template puts behind a turn depends on the turn's text")
            self._ends[key] = _end_of_turn(behind, new, ends)
        return self._glue(behind, new, tail, self._ends[key], ends)

    def read_off(
        self,
        shown: Callable[[Sequence[Message]], str],
        new: Sequence[Message],
        start: str,
        ends: Mapping[str, int],
    ) -> Glue:
        """Return the text after a turn that the template shows exactly as it was sampled.

        Args:
            shown: Renders the conversation with messages after the turn.
            start: The rendering up to the end of the turn's content.
        """

        def behind(messages: Sequence[Message]) -> str:
            return shown(messages).removeprefix(start)

        tail = behind(new)
        glue = self._glue(behind, new, tail, _end_of_turn(behind, new, ends), ends)
        if tail.removesuffix(glue.text).strip():
            raise NoExtension("the chat template writes more behind the text of a turn than the model did")
        return glue

    def header(self, new: Sequence[Message], inputs: TemplateInputs) -> str:
        """Return the text between the generation prompt and the content of a turn that messages follow."""
        text = self._render([_QUESTION, {"role": "assistant", "content": _MARKS[0]}, *new], inputs)
        prompted, head = self._render([_QUESTION], inputs), text.partition(_MARKS[0])[0]
        return head[len(prompted) :] if head.startswith(prompted) else ""

    def _glue(
        self,
        behind: Callable[[Sequence[Message]], str],
        new: Sequence[Message],
        tail: str,
        end: int,
        ends: Mapping[str, int],
    ) -> Glue:
        assert self._controls is not None, "there is no glue without a chat template"
        first = next(tail.index(text) for text, token_id in ends.items() if token_id == end)
        chosen = [index for index, message in enumerate(new) if self._controls.first_in(message["content"])]
        try:
            spans = content_spans(behind, new, chosen, tail)
        except RenderError as error:
            raise NoExtension(str(error)) from None
        return Glue(tail[first:], end, tuple((start - first, stop - first) for start, stop in spans))


def marked_and_shown(render: Callable[[Sequence[Message]], str], new: Sequence[Message]) -> str:
    """Render messages with marks as contents, and check that all marks are shown."""
    marked = [{**message, "content": f"{CONTENT_MARK}-{index}-"} for index, message in enumerate(new)]
    text = render(marked)
    for index, message in enumerate(marked):
        if message["content"] not in text:
            raise NoExtension(
                f"messages[{index}] is of role {message['role']}, and the chat template leaves it out; set"
                " policy.tokenizer.chat_template to a template that shows it"
            )
    return text


def _end_of_turn(behind: Callable[[Sequence[Message]], str], new: Sequence[Message], ends: Mapping[str, int]) -> int:
    """Return the token that ends a turn before these messages, and check that the template shows all of them."""
    before = marked_and_shown(behind, new).partition(CONTENT_MARK)[0]
    places = [(before.index(text), -len(text), token_id) for text, token_id in ends.items() if text and text in before]
    if not places:
        raise OtherEnd(
            "the chat template ends a turn that another follows with no token that ends the model's own, which are "
            + (", ".join(map(repr, ends)) or "none")
        )
    return min(places)[2]


def stand_ins(new: Sequence[Message]) -> Iterator[StandIn]:
    """Yield the forms that the sampled turn may have: calls if results answer it, a text, and calls with thinking.

    If the generation prompt opens a think block, some templates show that block only in turns with thinking.
    """
    results = [message for message in new if message["role"] == "tool"]
    # Some templates show only one call per turn.
    answered = [results, results[-1:]] if len(results) > 1 else [results] if results else []
    for called in answered:
        yield partial(_calls, called)
    yield lambda mark: {"role": "assistant", "content": mark}
    for called in answered:
        yield partial(_thought_and_calls, called)


def _calls(results: Sequence[Message], mark: str) -> Message:
    """Return a turn with a call for each result, with the mark in the arguments of the last call."""
    calls = [
        {
            "id": result.get("tool_call_id", _CALL_ID),
            "type": "function",
            "function": {
                "name": result.get("name", "tool"),
                "arguments": {"value": mark} if index == len(results) - 1 else {"value": "a"},
            },
        }
        for index, result in enumerate(results)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _thought_and_calls(results: Sequence[Message], mark: str) -> Message:
    return {**_calls(results, mark), THINKING_KEYS[0]: THOUGHT_MARK}


def with_calls(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Replace assistant turns before results by turns with calls, because some templates require calls there."""
    found = list(messages)
    for index, message in enumerate(messages):
        following = takewhile(lambda later: later["role"] == "tool", messages[index + 1 :])
        if message["role"] == "assistant" and "tool_calls" not in message and (results := list(following)):
            found[index] = _calls(results, "a")
    return tuple(found)


def require_unchanged(text: str, prompted: str, said: str, shown: str | None) -> None:
    """Check that the template does not change the conversation so far and the sampled turn once messages follow.

    Args:
        text: Rendering of all messages.
        prompted: Rendering of the conversation up to the turn, with the generation prompt.
        said: Text of the turn.
        shown: Rendering with the turn, or None if the template refuses it.

    Raises:
        Rewritten: A part has changed or is missing.
    """
    if not text.startswith(prompted):
        raise Rewritten("the chat template renders what stands before the turn in another way once it follows")
    # Blanks may differ because templates trim texts.
    if shown is not None and _without_blanks(said) not in _without_blanks(shown[len(prompted) :]):
        raise Rewritten("the chat template leaves out a part of the turn, such as thinking, once others follow")


def _without_blanks(text: str) -> str:
    return "".join(text.split())
