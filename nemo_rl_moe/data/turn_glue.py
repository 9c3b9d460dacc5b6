# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Glue of a chat template: what it puts behind the text of a turn, found in a conversation of one question.

A stand-in takes the place of the turn, in the forms that a turn of the model may have.
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
"""Makes a turn of the model with a text in it."""
THOUGHT_MARK = "thought-pv31"
Render = Callable[[Sequence[Message], TemplateInputs], str]
"""Renders messages with the generation prompt; raises `Refusal`."""
_MARKS = ("stand-in-qx7", "another-zk94")
CONTENT_MARK = "content-hj58"
_QUESTION: Message = {"role": "user", "content": "q"}
_CALL_ID = "abcdefghi"  # some templates want ids of nine letters and digits


class NoExtension(ValueError):
    """No tokens are known to continue a conversation without a change of what is there; the message is the reason."""


class Refusal(NoExtension):
    """The chat template refuses a conversation."""


class OtherEnd(NoExtension):
    """The template ends a turn that another follows in another way than the model ends its own."""


class Rewritten(NoExtension):
    """The chat template renders what is there in another way once messages follow."""


@dataclass(frozen=True)
class Glue:
    """What stands behind the text of a turn.

    Attributes:
        text: From the token on that ends the turn: glue, messages, the next generation prompt.
        end: That token.
        plain: Pieces of the text in which control tokens are plain text.
    """

    text: str
    end: int
    plain: tuple[Span, ...]


class GlueFinder:
    """Finds glue. What depends on the template and the roles of messages alone is checked once.

    Args:
        controls: None: there is no chat template.
    """

    def __init__(self, render: Render, controls: ControlTokens | None):
        self._render, self._controls = render, controls
        self._ends: dict[tuple[object, ...], int] = {}

    def find(
        self, form: int, stand_in: StandIn, new: Sequence[Message], inputs: TemplateInputs, ends: Mapping[str, int]
    ) -> Glue:
        """Return what stands behind a turn that messages follow.

        Args:
            form: Number of the stand-in among those that `stand_ins` yields.
            ends: Tokens that end the model's turns, by their texts.

        Raises:
            NoExtension: It depends on the turn's text, or has no end, or lacks a message.
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
        end = self._ends[key]
        place = next(tail.index(text) for text, token_id in ends.items() if token_id == end)
        return Glue(tail[place:], end, self._plain(behind, new, tail, place))

    def read_off(
        self,
        shown: Callable[[Sequence[Message]], str],
        new: Sequence[Message],
        start: str,
        ends: Mapping[str, int],
    ) -> Glue:
        """Return what stands behind a turn that the template shows as it was sampled.

        Args:
            shown: Renders the conversation with messages behind the turn.
            start: The rendering up to the end of the turn's text.

        Raises:
            NoExtension: It has no end, or lacks a message.
        """

        def behind(messages: Sequence[Message]) -> str:
            return shown(messages).removeprefix(start)

        tail = behind(new)
        end = _end_of_turn(behind, new, ends)
        place = next(tail.index(text) for text, token_id in ends.items() if token_id == end)
        if tail[:place].strip():
            raise NoExtension("the chat template writes more behind the text of a turn than the model did")
        return Glue(tail[place:], end, self._plain(behind, new, tail, place))

    def header(self, new: Sequence[Message], inputs: TemplateInputs) -> str:
        """Return what stands between the generation prompt and the text of a turn that messages follow."""
        text = self._render([_QUESTION, {"role": "assistant", "content": _MARKS[0]}, *new], inputs)
        prompted, head = self._render([_QUESTION], inputs), text.partition(_MARKS[0])[0]
        return head[len(prompted) :] if head.startswith(prompted) else ""

    def _plain(
        self, behind: Callable[[Sequence[Message]], str], new: Sequence[Message], tail: str, place: int
    ) -> tuple[Span, ...]:
        """Return where contents with control tokens stand behind the turn's end."""
        assert self._controls is not None, "there is no glue without a chat template"
        chosen = [index for index, message in enumerate(new) if self._controls.first_in(message["content"])]
        try:
            spans = content_spans(behind, new, chosen, tail)
        except RenderError as error:
            raise NoExtension(str(error)) from None
        return tuple((start - place, end - place) for start, end in spans)


def marked_and_shown(render: Callable[[Sequence[Message]], str], new: Sequence[Message]) -> str:
    """Render messages with marks for contents."""
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
    """Return the token that ends a turn before messages of some roles, all of which the template has to show."""
    before = marked_and_shown(behind, new).partition(CONTENT_MARK)[0]
    places = [(before.index(text), -len(text), token_id) for text, token_id in ends.items() if text and text in before]
    if not places:
        raise OtherEnd(
            "the chat template ends a turn that another follows with no token that ends the model's own, which are "
            + (", ".join(map(repr, ends)) or "none")
        )
    return min(places)[2]


def stand_ins(new: Sequence[Message]) -> Iterator[StandIn]:
    """Yield the forms that the sampled turn may have: calls, where results answer it, a text, and calls with thinking.

    Behind a generation prompt that opens a think block, some templates show that block of a turn that thinks alone.
    """
    results = [message for message in new if message["role"] == "tool"]
    # Some templates show one call a turn.
    answered = [results, results[-1:]] if len(results) > 1 else [results] if results else []
    for called in answered:
        yield partial(_calls, called)
    yield lambda mark: {"role": "assistant", "content": mark}
    for called in answered:
        yield partial(_thought_and_calls, called)


def _calls(results: Sequence[Message], mark: str) -> Message:
    """Return a turn of the calls that results answer, with the mark among the arguments of the last."""
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
    """Return a turn of calls with thinking before them."""
    return {**_calls(results, mark), THINKING_KEYS[0]: THOUGHT_MARK}


def with_calls(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return messages in which a turn that results follow calls tools; some templates take results no other way."""
    found = list(messages)
    for index, message in enumerate(messages):
        following = takewhile(lambda later: later["role"] == "tool", messages[index + 1 :])
        if message["role"] == "assistant" and "tool_calls" not in message and (results := list(following)):
            found[index] = _calls(results, "a")
    return tuple(found)


def require_unchanged(text: str, prompted: str, said: str, shown: str | None) -> None:
    """Check that the template still renders the conversation so far, and what the sampled turn says, as they are.

    Args:
        text: The rendering of all.
        prompted: That of the conversation up to the turn, with the generation prompt.
        shown: A rendering with the turn; None: the template refuses it.

    Raises:
        Rewritten: It does not.
    """
    if not text.startswith(prompted):
        raise Rewritten("the chat template renders what stands before the turn in another way once it follows")
    # Blanks may differ: templates trim texts.
    if shown is not None and _without_blanks(said) not in _without_blanks(shown[len(prompted) :]):
        raise Rewritten("the chat template leaves out a part of the turn, such as thinking, once others follow")


def _without_blanks(text: str) -> str:
    return "".join(text.split())
