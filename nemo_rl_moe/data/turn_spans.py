# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Exact spans of assistant turns in the text of a chat template that does not mark them. If they cannot be found, an
error is raised.

A turn starts after the generation prompt, as at inference, and ends with its end token. Both positions are found by
comparing renderings. Some templates render the beginning of a conversation in another way when more turns follow: they
drop the thinking of earlier turns, open a think block in the generation prompt, or end earlier turns with another
token. For these templates, texts of turns are replaced by stand-ins, whose positions show which turn each piece of the
text comes from.

A generation prompt may open a think block that the template omits in the turn, or writes empty or closed. The template
writes the marks of such a block, so the turn starts after them.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from nemo_rl_moe.data.messages import Message, with_changes

Result = TypeVar("Result")
Span = tuple[int, int]
"""Start and end of a piece of text, in characters."""
RenderMessages = Callable[[Sequence[Message], bool], str]
"""A function that renders messages, with the generation prompt at the end if the second argument is true."""
UNPROMPTED = "a turn after another text than the generation prompt, such as without the think block that it opens"
"""Note on an example, which messages print after the word "with"."""

_STAND_IN = "\u27e6this turn\u27e7"
_STAND_IN_BEFORE = "\u27e6the turn before\u27e7"
_STAND_IN_AFTER = "\u27e6the turn after\u27e7"
_MOST_NAMES = 4  # number of arguments of a call that are tried one by one
_BLOCK = r"(?:\s|</?think>|<\|(?:START|END)_THINKING\|>)*"
_OPENING_MARKS = ("<think>", "<|START_THINKING|>")
_BLOCK_AT_START, _BLOCK_AT_END = re.compile(_BLOCK), re.compile(rf"{_BLOCK}\Z")


class RenderError(ValueError):
    """A conversation cannot be rendered. The message gives the reason, without the conversation's file and line."""


@dataclass(frozen=True)
class TurnSpans:
    """Spans of assistant turns. `unprompted` is True if the text before any of these turns does not end with the
    generation prompt."""

    spans: list[Span]
    unprompted: bool


def turn_spans(
    messages: Sequence[Message],
    trained: Collection[int],
    text: str,
    render: RenderMessages,
    special_tokens: Collection[str],
    opening: str = "",
) -> TurnSpans:
    """Return the spans of the assistant turns with the indices `trained` in `text`, the rendering of `messages`.
    `opening` is the generation prompt that follows a question.

    Raises:
        RenderError: The tokens of a turn cannot be separated from the rest.
    """
    spans, unprompted = [], False
    for index in sorted(trained):
        turn = _Turn(messages, index, text, render, special_tokens)
        start, is_prompted = turn.start()
        header = _role_header(text[start:], opening, special_tokens)
        end = turn.end(start)
        turn.require_own_text_alone(start + header, end, opening)
        spans.append((start + header, end))
        unprompted = unprompted or not is_prompted or header > 0
    return TurnSpans(spans, unprompted)


def trained_spans(spans: list[Span], messages: Sequence[Message], trained: Collection[int]) -> list[Span]:
    """Return the spans of turns to train on, out of the `spans` that a template marks. If some turns are context, the
    template must mark one span per assistant turn."""
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if len(trained) == len(turns):
        return spans
    if len(spans) != len(turns):
        raise RenderError(
            f"the chat template marks {len(spans)} pieces in {len(turns)} assistant turns, "
            "so that the turns to train on cannot be distinguished from context"
        )
    return [span for index, span in zip(turns, spans, strict=True) if index in trained]


def _with_stand_ins(turn: Message, stand_in: str) -> list[Message]:
    """Return variants of a turn, in which a stand-in replaces its text or a part of its last call. A template may not
    show some of them."""
    text: Message = {**turn, "content": stand_in}
    if not turn.get("tool_calls"):
        return [text]
    *earlier, call = turn["tool_calls"]
    function = call["function"]
    as_text = isinstance(function["arguments"], str)
    own = json.loads(function["arguments"]) if as_text else function["arguments"]
    others: list[dict[str, Any]] = [{"stand-in": stand_in}, *({**own, name: stand_in} for name in [*own][:_MOST_NAMES])]
    changes: list[dict[str, Any]] = [
        *({"arguments": json.dumps(other, ensure_ascii=False) if as_text else other} for other in others),
        {"name": stand_in},
    ]
    of_call = [{**turn, "tool_calls": [*earlier, {**call, "function": {**function, **change}}]} for change in changes]
    return [text, *of_call] if turn["content"] else [*of_call, text]


class _Turn:
    def __init__(
        self,
        messages: Sequence[Message],
        index: int,
        text: str,
        render: RenderMessages,
        special_tokens: Collection[str],
    ):
        self._messages, self._index, self._text, self._render = messages, index, text, render
        self._special_tokens = special_tokens
        self._before, self._after = list(messages[:index]), list(messages[index + 1 :])
        self._stand_ins = _with_stand_ins(messages[index], _STAND_IN)

    def start(self) -> tuple[int, bool]:
        """Return the index of the turn's first character after the generation prompt. Also return whether the complete
        generation prompt precedes the turn."""
        prompt = self._render(self._before, True) if self._before else ""
        if self._before and self._text.startswith(prompt):
            return len(prompt), True
        if not self._before:
            raise self._unstable("there is no message before it")
        # A turn of text begins as any other turn and has no other parts. Some templates refuse such a turn before a
        # result.
        turns = ({"role": "assistant", "content": _STAND_IN}, *self._stand_ins)
        return _first_result(
            partial(self._start_by, before, turn)
            for before in _with_stand_ins(self._before[-1], _STAND_IN_BEFORE)
            for turn in turns
        )

    def _start_by(self, before: Message, stand_in: Message) -> tuple[int, bool]:
        context = [*self._before[:-1], before]
        # between: text between both stand-ins in the conversation. prompted: text after the first one in the prompt.
        whole = self._render([*context, stand_in, *self._after], False)
        between, found, _ = self._behind(_STAND_IN_BEFORE, whole).partition(_STAND_IN)
        prompted = _spaced_as(between, self._behind(_STAND_IN_BEFORE, self._render(context, True)))
        # head: the text before the turn, with the real text of the turn before it.
        head, found_too, _ = self._render([*self._before, stand_in, *self._after], False).partition(_STAND_IN)
        if found and found_too and head.endswith(between):
            if between.startswith(prompted):
                opened = len(prompted)  # the model writes the text that the template adds after the prompt
            elif prompted.startswith(between):
                opened = len(between)  # the prompt opens a think block that the turn lacks
            elif (closed := _without_thinking(between, prompted, self._special_tokens)) is not None:
                opened = closed
            else:
                raise self._unstable(f"the turn opens with {between!r}, and the generation prompt with {prompted!r}")
            start = len(head) - len(between) + opened
            if _is_closed(prompted) and self._text[start:].lstrip().startswith(_OPENING_MARKS):
                raise self._unstable("the turn contains thinking, and the generation prompt closes the think block")
            if self._text.startswith(head[:start]):
                return start, between.startswith(prompted)
        raise self._unstable("the messages before the turn are rendered in another way when the turn follows")

    def end(self, start: int) -> int:
        """Return the end of the turn after its end token."""
        text = self._text
        if not self._after:
            return len(text)
        up_to_turn = self._render([*self._before, self._messages[self._index]], False)
        if text.startswith(up_to_turn) and len(up_to_turn) >= start:
            return len(up_to_turn)
        return _first_result(partial(self._end_by, stand_in, start) for stand_in in self._stand_ins)

    def require_own_text_alone(self, start: int, end: int, opening: str) -> None:
        """Raise `RenderError` if the turn contains a role header, as it may if the previous turn is the assistant's
        too."""
        header = first_token(opening.strip(), self._special_tokens) or opening.strip()
        if header and self._before[-1]["role"] == "assistant" and header in self._text[start:end]:
            raise self._unstable(f"{header!r} is written between the turn and the assistant's turn before it")

    def _end_by(self, stand_in: Message, start: int) -> int:
        text = self._text
        tail = self._behind(_STAND_IN, self._render([*self._before, stand_in, *self._after], False))
        ending = self._behind(_STAND_IN, self._render([*self._before, stand_in], False))
        token = first_token(ending, self._special_tokens)
        if tail.startswith(ending):
            rest = tail[len(ending) :]
        elif token and token == first_token(tail, self._special_tokens):
            rest = tail[len(token) :]  # as the last turn, it has other text after its end token
        elif token == ending.strip() and first_token(tail, self._special_tokens):
            rest = tail  # the model does not write its end token, so only its text is trained on
        else:
            raise self._unstable("the turn is rendered in another way when further turns follow")
        end = len(text) - len(rest)
        if not text.endswith(rest) or end < start:
            raise self._unstable("the turn is rendered in another way when further turns follow")
        changed = with_changes(self._messages, self._index + 1, content=_STAND_IN_AFTER)
        if not self._render(changed, False).startswith(text[:end]):
            raise self._unstable("a part of the turn is written after the next turn")
        return end

    def _behind(self, stand_in: str, text: str) -> str:
        _, found, behind = text.partition(stand_in)
        if not found or stand_in in behind:
            raise self._unstable("the text of the turn or before the turn does not appear exactly once")
        return behind

    def _unstable(self, what: str) -> RenderError:
        return RenderError(
            f"the tokens of turn {self._index} cannot be distinguished from the rest: with this chat template {what}; "
            "set policy.tokenizer.chat_template to a template with {% generation %} tags"
        )


def _first_result(attempts: Iterable[Callable[[], Result]]) -> Result:
    """Return the result of the first attempt that raises no `RenderError`, or raise the error of the first attempt."""
    problem: RenderError | None = None
    for attempt in attempts:
        try:
            return attempt()
        except RenderError as error:
            problem = problem or error
    assert problem is not None
    raise problem


def _spaced_as(between: str, prompted: str) -> str:
    """Return the generation prompt with the same blank space before its header as in the conversation.

    The blank space may differ, because some templates put a newline after an assistant turn only if another turn
    follows.

    Args:
        between: Text of the conversation from the previous turn to the turn.
        prompted: The generation prompt in the same position.
    """
    end = common_start(between, prompted)
    header, opening = prompted[len(end) :], between[len(end) :]
    blank = opening[: len(opening) - len(opening.lstrip())]
    return f"{end}{blank}{header}" if header and opening.startswith(blank + header) else prompted


def common_start(text: str, other: str) -> str:
    """Return the longest common beginning of two texts."""
    same = (text[:i] for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b)
    return next(same, min(text, other, key=len))


def first_token(text: str, tokens: Collection[str]) -> str:
    """Return the longest token with which a text begins, or an empty text."""
    return max((token for token in tokens if text.startswith(token)), key=len, default="")


def _without_thinking(between: str, prompted: str, special_tokens: Collection[str]) -> int | None:
    """Return the start of a turn without thinking in `between`, if `between` and the prompt differ only in a think
    block, else None."""
    # between: Text before the content of the turn.
    # prompted: The generation prompt at the same position.
    header = prompted[: _block_at_end(prompted).start()]
    if not prompted[len(header) :].strip() or not between.startswith(header):
        return None
    block = _BLOCK_AT_START.match(between, len(header))
    assert block is not None, "the pattern matches an empty text too"
    rest = between[block.end() :]
    # After a block that the prompt closes, the model does not think.
    is_opened = block[0].rstrip().endswith(_OPENING_MARKS) and _is_closed(prompted)
    return None if is_opened or (rest and not first_token(rest, special_tokens)) else block.end()


def _is_closed(prompted: str) -> bool:
    """Return whether a generation prompt ends with a closed think block."""
    block = _block_at_end(prompted)[0].rstrip()
    return bool(block) and not block.endswith(_OPENING_MARKS)


def _block_at_end(text: str) -> re.Match[str]:
    found = _BLOCK_AT_END.search(text)
    assert found is not None, "the pattern matches an empty text too"
    return found


def _role_header(text: str, opening: str, special_tokens: Collection[str]) -> int:
    """Return the length of the longest common beginning of a text and the generation prompt `opening`. 0 if this
    beginning does not start with a special token."""
    # A template may omit this beginning in the prompt after a tool's result, but write it in the conversation.
    same = common_start(text, opening)
    return len(same) if first_token(same, special_tokens) else 0
