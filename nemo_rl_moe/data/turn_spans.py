# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Spans of assistant turns in the text of a chat template that does not mark them: exact, or an error.

A turn starts where the generation prompt ends that the model answers at inference, and ends with what ends it when it
is the last. Both are found by comparing renderings. Where a template renders the beginning of a conversation in another
way once more follows (it drops the thinking of earlier turns, opens a think block in the generation prompt, or ends
earlier turns with another token), stand-ins in place of texts show which piece of the text comes from where.

A generation prompt may open a think block that the template leaves out of a turn, or writes there empty or closed. The
marks of that block are the template's: the turn starts behind them.
"""

import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_rl_moe.data.messages import Message

Span = tuple[int, int]
"""First character and the one after the last."""
RenderMessages = Callable[[Sequence[Message], bool], str]
"""Renders messages, with the generation prompt at the end or without."""
UNPROMPTED = "a turn behind another text than the generation prompt, such as without the think block that it opens"
"""Words for a note, after "with"."""

_STAND_IN = "\u27e6this turn\u27e7"
_STAND_IN_BEFORE = "\u27e6the turn before\u27e7"
_STAND_IN_AFTER = "\u27e6the turn after\u27e7"
_MOST_NAMES = 4  # arguments of a call that are tried one by one
_BLOCK = r"(?:\s|</?think>|<\|(?:START|END)_THINKING\|>)*"
_OPENING_MARKS = ("<think>", "<|START_THINKING|>")
_BLOCK_AT_START, _BLOCK_AT_END = re.compile(_BLOCK), re.compile(rf"{_BLOCK}\Z")


class RenderError(ValueError):
    """A conversation cannot be rendered; the message is the reason, without the place."""


@dataclass(frozen=True)
class TurnSpans:
    """Spans of assistant turns.

    Attributes:
        unprompted: Whether a turn stands behind another text than the generation prompt.
    """

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
    """Find the spans of assistant turns.

    Args:
        trained: Their indices; other assistant turns are context.
        opening: The generation prompt behind a question.

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
    """Return the pieces that a template marks, without those of context turns.

    Args:
        spans: Marked pieces, one of each assistant turn.
        trained: Turns that are no context.

    Raises:
        RenderError: Pieces and turns cannot be matched.
    """
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if len(trained) == len(turns):
        return spans
    if len(spans) != len(turns):
        raise RenderError(
            f"the chat template marks {len(spans)} pieces in {len(turns)} assistant turns, "
            "so that those to train on cannot be distinguished from context"
        )
    return [span for index, span in zip(turns, spans, strict=True) if index in trained]


def _with_stand_ins(turn: Message, stand_in: str) -> list[Message]:
    """Return the turn with a stand-in for its text, or for a part of its last call: a template may show one alone."""
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
    """One assistant turn of a rendered conversation."""

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
        """Return the first character after the generation prompt, and whether all of that prompt stands before it."""
        prompt = self._render(self._before, True) if self._before else ""
        if self._before and self._text.startswith(prompt):
            return len(prompt), True
        if not self._before:
            raise self._unstable("nothing stands before it that it could answer")
        problem: RenderError | None = None
        # A turn of text alone opens as any other does, and holds nothing of the turn's own; some templates refuse it
        # before a tool's result.
        for before in _with_stand_ins(self._before[-1], _STAND_IN_BEFORE):
            for turn in ({"role": "assistant", "content": _STAND_IN}, *self._stand_ins):
                try:
                    return self._start_by(before, turn)
                except RenderError as error:
                    problem = problem or error
        assert problem is not None
        raise problem

    def _start_by(self, before: Message, stand_in: Message) -> tuple[int, bool]:
        """Find the first character after the generation prompt, by stand-ins for two turns."""
        context = [*self._before[:-1], before]
        # What stands between the two stand-ins in the conversation, and what the generation prompt puts there.
        whole = self._render([*context, stand_in, *self._after], False)
        between, found, _ = self._behind(_STAND_IN_BEFORE, whole).partition(_STAND_IN)
        prompted = _spaced_as(between, self._behind(_STAND_IN_BEFORE, self._render(context, True)))
        # The same with the true text before the turn.
        head, found_too, _ = self._render([*self._before, stand_in, *self._after], False).partition(_STAND_IN)
        if found and found_too and head.endswith(between):
            if between.startswith(prompted):
                opened = len(prompted)  # what the template adds before the text is the model's to write
            elif prompted.startswith(between):
                opened = len(between)  # the generation prompt opens more than the turn has: a think block
            elif (closed := _without_thinking(between, prompted, self._special_tokens)) is not None:
                opened = closed
            else:
                raise self._unstable(f"it opens with {between!r}, and the generation prompt with {prompted!r}")
            start = len(head) - len(between) + opened
            if _is_closed(prompted) and self._text[start:].lstrip().startswith(_OPENING_MARKS):
                raise self._unstable("it thinks, and the generation prompt closes the think block")
            if self._text.startswith(head[:start]):
                return start, between.startswith(prompted)
        raise self._unstable("what stands before it is rendered in another way once it follows")

    def end(self, start: int) -> int:
        """Return the character after its end token."""
        text = self._text
        if not self._after:
            return len(text)
        up_to_turn = self._render([*self._before, self._messages[self._index]], False)
        if text.startswith(up_to_turn) and len(up_to_turn) >= start:
            return len(up_to_turn)
        problem: RenderError | None = None
        for stand_in in self._stand_ins:
            try:
                return self._end_by(stand_in, start)
            except RenderError as error:
                problem = problem or error
        assert problem is not None
        raise problem

    def require_own_text_alone(self, start: int, end: int, opening: str) -> None:
        """Reject a turn behind another one of the assistant, where the template prompts for none, with its header."""
        header = _first_token(opening.strip(), self._special_tokens) or opening.strip()
        if header and self._before[-1]["role"] == "assistant" and header in self._text[start:end]:
            raise self._unstable(f"{header!r} stands between it and the turn of the assistant before it")

    def _end_by(self, stand_in: Message, start: int) -> int:
        """Find the character after the end token by a stand-in for the turn."""
        text = self._text
        tail = self._behind(_STAND_IN, self._render([*self._before, stand_in, *self._after], False))
        ending = self._behind(_STAND_IN, self._render([*self._before, stand_in], False))
        token = _first_token(ending, self._special_tokens)
        if tail.startswith(ending):
            rest = tail[len(ending) :]
        elif token and token == _first_token(tail, self._special_tokens):
            rest = tail[len(token) :]  # behind the token that ends it stands another one where it is the last
        elif token == ending.strip() and _first_token(tail, self._special_tokens):
            rest = tail  # it ends with another token than the one that the model would write: only its text counts
        else:
            raise self._unstable("it is rendered in another way once further turns follow")
        end = len(text) - len(rest)
        if not text.endswith(rest) or end < start:
            raise self._unstable("it is rendered in another way once further turns follow")
        following, *others = self._after
        changed = [*self._before, self._messages[self._index], {**following, "content": _STAND_IN_AFTER}, *others]
        if not self._render(changed, False).startswith(text[:end]):
            raise self._unstable("a part of it stands behind what follows")
        return end

    def _behind(self, stand_in: str, text: str) -> str:
        _, found, behind = text.partition(stand_in)
        if not found or stand_in in behind:
            raise self._unstable("its text or the text before it does not stand there once")
        return behind

    def _unstable(self, what: str) -> RenderError:
        return RenderError(
            f"the tokens of turn {self._index} cannot be distinguished from the rest: with this chat template {what}; "
            "set policy.tokenizer.chat_template to a template with {% generation %} tags"
        )


def _spaced_as(between: str, prompted: str) -> str:
    """Return the generation prompt after the turn before, with the blank space of the conversation before its header.

    Some templates put a newline behind an assistant turn only where another turn follows.
    """
    same = next((i for i, (a, b) in enumerate(zip(between, prompted, strict=False)) if a != b), len(prompted))
    end, header, opening = prompted[:same], prompted[same:], between[same:]
    blank = opening[: len(opening) - len(opening.lstrip())]
    return f"{end}{blank}{header}" if header and opening.startswith(blank + header) else prompted


def _first_token(text: str, special_tokens: Collection[str]) -> str:
    """Return the longest special token that the text begins with; empty without one."""
    return max((token for token in special_tokens if text.startswith(token)), key=len, default="")


def _without_thinking(between: str, prompted: str, special_tokens: Collection[str]) -> int | None:
    """Return where a turn starts that has no thinking, or an empty or closed block, behind a prompt that opens one."""
    # between: What stands before the text of the turn.
    # prompted: The generation prompt in its place.
    # Returns the place in `between`, before a special token that the model writes; None: they differ by more than the
    # block.
    header = prompted[: _block_at_end(prompted).start()]
    if not prompted[len(header) :].strip() or not between.startswith(header):
        return None
    block = _BLOCK_AT_START.match(between, len(header))
    assert block is not None, "the pattern matches an empty text too"
    rest = between[block.end() :]
    # Behind a block that the prompt closes, the model does not think.
    is_opened = block[0].rstrip().endswith(_OPENING_MARKS) and _is_closed(prompted)
    return None if is_opened or (rest and not _first_token(rest, special_tokens)) else block.end()


def _is_closed(prompted: str) -> bool:
    """Return whether a generation prompt closes the think block that it has."""
    block = _block_at_end(prompted)[0].rstrip()
    return bool(block) and not block.endswith(_OPENING_MARKS)


def _block_at_end(text: str) -> re.Match[str]:
    found = _BLOCK_AT_END.search(text)
    assert found is not None, "the pattern matches an empty text too"
    return found


def _role_header(text: str, opening: str, special_tokens: Collection[str]) -> int:
    """Return the length of the generation prompt's part with a special token that a text begins with."""
    # A template may leave that part out of the prompt behind a tool's result, and yet write it in the conversation.
    same = next(
        (i for i, (a, b) in enumerate(zip(text, opening, strict=False)) if a != b), min(len(text), len(opening))
    )
    return same if _first_token(text[:same], special_tokens) else 0
