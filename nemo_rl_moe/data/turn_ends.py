# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Ends of turns: the token at which generation stops is trained on, also if the template writes it as another's mark.

GLM's template closes no turn; the mark of the next role follows, and generation stops at that mark.
"""

from collections.abc import Callable, Collection, Sequence

from nemo_rl_moe.data.turn_spans import Span

UNTRAINED_END = "a turn whose stop token stands outside the {% generation %} tags of the chat template"
"""Words for a note, after "with"."""


def longest_start(text: str, stop_texts: Collection[str]) -> str:
    """Return the longest stop token that a text begins with; empty without one."""
    return max((stop for stop in stop_texts if stop and text.startswith(stop)), key=len, default="")


def longest_end(text: str, stop_texts: Collection[str]) -> str:
    """Return the longest stop token that a text ends with, blank space aside; empty without one."""
    stripped = text.rstrip()
    return max((stop for stop in stop_texts if stop and stripped.endswith(stop)), key=len, default="")


def end_of(own: str, followed: str, stop_texts: Collection[str]) -> str:
    """Return the stop token at which generation ends a turn: the turn's first, else the one behind it; empty: none.

    Args:
        own: What stands behind the text of a turn that is the last.
        followed: The same where another turn follows.
    """
    places = [(own.index(stop), -len(stop), stop) for stop in stop_texts if stop and stop in own]
    if places:
        return min(places)[2]
    return longest_start(followed[len(own) :], stop_texts) if followed.startswith(own) else ""


def leaves_out_end(text: str, span: Span, stop_texts: Collection[str]) -> bool:
    """Return whether a stop token stands right behind a span that has none."""
    first, end = span
    return not longest_end(text[first:end], stop_texts) and bool(longest_start(text[end:].lstrip(), stop_texts))


def close_turns(
    text: str, spans: Sequence[Span], stop_texts: Collection[str], end_of_last: Callable[[], str]
) -> tuple[str, list[Span]]:
    """Have the span of each turn end with the stop token that ends it or follows it.

    Blank space and further stop tokens behind that token belong to no turn: generation has stopped.

    Args:
        spans: The turns to train on, as the template closes them; a last one may reach beyond the text.
        end_of_last: Returns the token that would follow the last turn of the conversation; empty: none.

    Returns:
        The text, with that token where a turn is its last, and the spans.
    """
    closed: list[Span] = []
    for first, end in spans:
        end = _first_end(text, first, end, stop_texts)
        if not longest_end(text[first:end], stop_texts):
            if end == len(text):
                text += end_of_last()
            end += len(longest_start(text[end:], stop_texts))
        closed.append((first, end))
    return text, closed


def _first_end(text: str, first: int, end: int, stop_texts: Collection[str]) -> int:
    """Return the end of a turn without what stands behind the first of the stop tokens that end it."""
    end = min(end, len(text))
    own = text[first:end]
    while stop := longest_end(own, stop_texts):
        own = own.rstrip()
        end = first + len(own)
        own = own.removesuffix(stop)
    return end
