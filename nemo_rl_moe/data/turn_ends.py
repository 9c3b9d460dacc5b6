# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Ends of turns. The token at which generation stops is trained on, even if it is the mark of the next role.

GLM's template, for example, writes no token at the end of a turn. Generation stops at the mark of the next role, which
follows.
"""

from collections.abc import Callable, Collection, Sequence

from nemo_rl_moe.data.turn_spans import Span, first_token

UNTRAINED_END = "a turn whose stop token is outside of the {% generation %} tags of the chat template"
"""Note on an example, which messages print after the word "with"."""


def end_of(own: str, followed: str, stop_texts: Collection[str]) -> str:
    """Return the stop token at which generation ends a turn: the first one in the turn or else the first one after it.
    Empty if there is none.

    Args:
        own: Text that the template puts after the content of a turn if the turn is the last.
        followed: Text that it puts there if another turn follows.
    """
    found = [(own.index(stop), -len(stop), stop) for stop in stop_texts if stop and stop in own]
    if found:
        return min(found)[2]
    return first_token(followed[len(own) :], stop_texts) if followed.startswith(own) else ""


def leaves_out_end(text: str, span: Span, stop_texts: Collection[str]) -> bool:
    """Return whether a stop token follows a span that does not end with a stop token itself."""
    first, end = span
    return not _last_token(text[first:end], stop_texts) and bool(first_token(text[end:].lstrip(), stop_texts))


def close_turns(
    text: str, spans: Sequence[Span], stop_texts: Collection[str], end_of_last: Callable[[], str]
) -> tuple[str, list[Span]]:
    """Move the end of each turn's span, so that the span ends with the stop token that ends or follows the turn.

    Blank space and further stop tokens after that token belong to no turn, because generation has stopped there.

    Args:
        spans: Spans of the turns to train on, up to the end that the template writes. The last span may reach beyond
            the text.
        end_of_last: Returns the token that would follow the last turn of the conversation, or an empty text.

    Returns:
        The text and the new spans. If the last turn lacks its stop token, the token is appended to the text.
    """
    closed: list[Span] = []
    for first, end in spans:
        end = _first_end(text, first, end, stop_texts)
        if not _last_token(text[first:end], stop_texts):
            if end == len(text):
                text += end_of_last()
            end += len(first_token(text[end:], stop_texts))
        closed.append((first, end))
    return text, closed


def _first_end(text: str, first: int, end: int, stop_texts: Collection[str]) -> int:
    """Return the end of a turn's span, shortened so that the span ends with only one stop token if it ended with
    several."""
    end = min(end, len(text))
    own = text[first:end]
    while stop := _last_token(own, stop_texts):
        own = own.rstrip()
        end = first + len(own)
        own = own.removesuffix(stop)
    return end


def _last_token(text: str, stop_texts: Collection[str]) -> str:
    """Return the longest stop token with which a text ends, apart from blank space, or an empty text."""
    stripped = text.rstrip()
    return max((stop for stop in stop_texts if stripped.endswith(stop)), key=len, default="")
