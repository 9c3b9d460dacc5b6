# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Glue of a chat template: the text that it writes after the content of a turn. It is found in a conversation of one
question.

In this conversation, a stand-in replaces the turn. It has one of the forms that a turn of the model may have.
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
"""A function that returns a turn of the model that contains a text."""
THOUGHT_MARK = "thought-pv31"
Render = Callable[[Sequence[Message], TemplateInputs], str]
"""A function that renders messages with the generation prompt. Raises `Refusal`."""
_MARKS = ("stand-in-qx7", "another-zk94")
CONTENT_MARK = "content-hj58"
_QUESTION: Message = {"role": "user", "content": "q"}
_CALL_ID = "abcdefghi"  # some templates require ids of nine letters and digits


class NoExtension(ValueError):
    """A conversation cannot be continued by appending tokens. The message gives the reason."""


class Refusal(NoExtension):
    """The chat template refuses a conversation."""


class OtherEnd(NoExtension):
    """The template ends a turn that is not the last one with another token than the model has sampled."""


class Rewritten(NoExtension):
    """The chat template renders a conversation in another way as soon as further messages follow."""


@dataclass(frozen=True)
class Glue:
    """The template's text after the content of a turn, up to and including the next generation prompt.

    Attributes:
        text: End token of the turn, text between turns, messages that follow, and the next generation prompt.
        end: Id of the turn's end token.
        plain: Spans of the text in which control tokens are plain text.
    """

    text: str
    end: int
    plain: tuple[Span, ...]


class GlueFinder:
    """Finds glue, the text that a chat template writes after the content of a turn.

    Checks that only depend on the template and the roles of messages are made once.
    """

    def __init__(self, render: Render, controls: ControlTokens | None):
        self._render, self._controls = render, controls
        self._ends: dict[tuple[object, ...], int] = {}

    def find(
        self, form: int, stand_in: StandIn, new: Sequence[Message], inputs: TemplateInputs, ends: Mapping[str, int]
    ) -> Glue:
        """Return the glue after a turn's content if the messages `new` follow.

        Args:
            form: Index of `stand_in` in the result of `stand_ins`.
            stand_in: Makes the turn that replaces the sampled turn.
            ends: Text -> id of the tokens that end the model's turns.

        Raises:
            NoExtension: The text after the content depends on the content, has no end token, or lacks a message.
        """

        def behind(messages: Sequence[Message], mark: str = _MARKS[0]) -> str:
            _, found, tail = self._render([_QUESTION, stand_in(mark), *messages], inputs).partition(mark)
            if not found or mark in tail:
                raise NoExtension("the chat template does not show the text of a turn exactly once")
            return tail

        key = form, bool(inputs.tools), *ends, *(message["role"] for message in new)
        tail = behind(new)
        if key not in self._ends:
            if behind(new, _MARKS[1]) != tail:
                raise NoExtension("the text that the chat template writes after a turn depends on the turn's text")
            self._ends[key] = _end_of_turn(behind, new, ends)
        return self._glue(behind, new, tail, self._ends[key], ends)

    def read_off(
        self,
        shown: Callable[[Sequence[Message]], str],
        new: Sequence[Message],
        start: str,
        ends: Mapping[str, int],
    ) -> Glue:
        """Return the glue after a turn's content if the messages `new` follow, read from the conversation itself.

        Requires that the template shows the content exactly as it was sampled.

        Args:
            shown: Renders the conversation up to the turn, and the given messages after it.
            start: Rendering of the conversation up to the end of the turn's content.
            ends: Text -> id of the tokens that end the model's turns.

        Raises:
            NoExtension: The template writes more at the end of the turn, writes no end token, or lacks a message.
        """

        def behind(messages: Sequence[Message]) -> str:
            return shown(messages).removeprefix(start)

        tail = behind(new)
        glue = self._glue(behind, new, tail, _end_of_turn(behind, new, ends), ends)
        if tail.removesuffix(glue.text).strip():
            raise NoExtension("the chat template writes more text at the end of a turn than the model did")
        return glue

    def header(self, new: Sequence[Message], inputs: TemplateInputs) -> str:
        """Return the text that the template writes between the generation prompt and the content of a turn, if messages
        follow the turn."""
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
    """Return the rendering of messages whose contents are replaced by marks, and check that it shows all marks."""
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
    """Return the token that ends a turn if the messages `new` follow it, and check that the template shows these
    messages."""
    before = marked_and_shown(behind, new).partition(CONTENT_MARK)[0]
    places = [(before.index(text), -len(text), token_id) for text, token_id in ends.items() if text and text in before]
    if not places:
        raise OtherEnd(
            "after a turn that is not the last, the chat template writes none of the tokens that end the model's turns:"
            " " + (", ".join(map(repr, ends)) or "none")
        )
    return min(places)[2]


def stand_ins(new: Sequence[Message]) -> Iterator[StandIn]:
    """Yield stand-ins, which replace the sampled turn in a rendering, one for each form that the turn may have.

    The forms are tool calls (if `new` has results of tools), a text, and tool calls with thinking. The last form is for
    templates whose generation prompt opens a think block, but that show the block only in turns with thinking.
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
    """Return a turn with a call for each result. The arguments of the last call contain the mark."""
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
    """Return messages in which an assistant turn before tools' results has calls. If it had none, another turn with a
    call for each result replaces it, because some templates refuse results without calls."""
    found = list(messages)
    for index, message in enumerate(messages):
        following = takewhile(lambda later: later["role"] == "tool", messages[index + 1 :])
        if message["role"] == "assistant" and "tool_calls" not in message and (results := list(following)):
            found[index] = _calls(results, "a")
    return tuple(found)


def require_unchanged(text: str, prompted: str, said: str, shown: str | None) -> None:
    """Check that the template does not change the conversation so far, or the sampled turn, when messages follow.

    Args:
        text: Rendering of all messages.
        prompted: Rendering of the conversation up to the turn, with the generation prompt.
        said: Text of the sampled turn.
        shown: Rendering of all messages with the sampled text as turn, or None if the template refuses it.

    Raises:
        Rewritten: A part has changed or is missing.
    """
    if not text.startswith(prompted):
        raise Rewritten("the chat template renders the turns before the sampled turn in another way once it follows")
    # Blank space may differ, because templates trim texts.
    if shown is not None and _without_blanks(said) not in _without_blanks(shown[len(prompted) :]):
        raise Rewritten("the chat template leaves out a part of the turn, such as thinking, once others follow")


def _without_blanks(text: str) -> str:
    return "".join(text.split())
