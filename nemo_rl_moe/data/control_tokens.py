# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Control tokens of a chat format. Only the chat template may write them.

A tool's result may contain the text of a control token, by chance or to forge a turn. In a result, this text is
tokenized as plain text.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from nemo_rl_moe.data.chat_template import template_setup
from nemo_rl_moe.data.messages import Message, with_changes
from nemo_rl_moe.data.record_values import RecordError
from nemo_rl_moe.data.turn_spans import RenderError, Span

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARK = "stand-in-vw35"
_LETTERS_OF_A_TOKEN, _FEWEST_OF_A_PIECE, _MORE_AT_A_CUT = 8, 1000, 16


class ControlTokens:
    """Control tokens of a tokenizer: special tokens, and other added tokens that its chat template writes."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", most_tokens: int | None = None):
        self._tokenizer, self._most_tokens = tokenizer, most_tokens
        templates = "".join(template_setup(tokenizer, with_tools=with_tools).template for with_tools in (False, True))
        texts = {
            number: token.content
            for number, token in tokenizer.added_tokens_decoder.items()
            if token.content.strip() and (token.special or token.content in templates)
        }
        self._ids = frozenset(texts)
        longest_first = sorted(texts.values(), key=len, reverse=True)
        self._texts = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def first_in(self, text: str) -> str | None:
        """Return the first control token in a text, or None."""
        found = self._texts.search(text)
        return found[0] if found is not None else None

    def require_none_in_names(self, messages: Sequence[Message]) -> None:
        """Raise `RecordError` if a value other than role or content, such as the name of a tool, contains a control
        token."""
        for index, message in enumerate(messages):
            for key, value in message.items():
                if key not in ("role", "content") and isinstance(value, str) and self.first_in(value) is not None:
                    raise RecordError(f"messages[{index}].{key} has the text of a control token: {value!r}")

    def encode(self, text: str, plain: Sequence[Span] = ()) -> list[int]:
        """Tokenize a text and return its token ids. If there are more than `most_tokens`, tokenization stops soon after
        that number.

        Args:
            plain: Spans, in order, in which control tokens are plain text. If the tokenizer has no other tokens for
                such a text, `RenderError` is raised.
        """
        if (too_many := too_many_tokens(text, self._most_tokens, self._encode)) is not None:
            return too_many
        cuts = list(self._cuts(text, plain))
        if not cuts:
            return self._encode(text)
        pieces = (text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True))
        ids = [token_id for piece in pieces for token_id in self._encode(piece)]
        starts, ends = [start for start, _ in plain], [end for _, end in plain]
        outside = [text[end:start] for end, start in zip([0, *ends], [*starts, len(text)], strict=True)]
        if self._controls(ids) != self._controls(self._encode(_MARK.join(outside))):
            raise RenderError(
                "a message has the text of a control token, which the tokenizer cannot encode as plain text"
            )
        return ids

    def _cuts(self, text: str, plain: Sequence[Span]) -> Iterator[int]:
        """Yield positions to cut `text` at: one inside each control token's text that overlaps a span of `plain`."""
        position = 0
        while (found := self._texts.search(text, position)) is not None:
            start, end = found.span()
            touches = any(start < last and end > first for first, last in plain)
            if touches:
                yield start + 1
            # The rest of a text that is cut may be the beginning of another control token.
            position = start + 1 if touches else end

    def _encode(self, text: str) -> list[int]:
        try:
            return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        except Exception as error:  # the tokenizers library raises bare `Exception`s
            raise RenderError(f"the tokenizer cannot encode the text: {error}") from None

    def _controls(self, ids: Sequence[int]) -> list[int]:
        return [token_id for token_id in ids if token_id in self._ids]


def too_many_tokens(text: str, most_tokens: int | None, encode: Callable[[str], Sequence[int]]) -> list[int] | None:
    """Return the first tokens of a text that has more than `most_tokens` tokens. Return None for a shorter text.

    The number of tokens is a little above `most_tokens`.

    Tokenization blocks the process, and a text of megabytes takes many seconds. A long text is therefore tokenized in
    pieces until there are too many tokens. Each cut may add a few tokens.
    """
    if most_tokens is None or len(text) <= _LETTERS_OF_A_TOKEN * most_tokens:
        return None
    size = _LETTERS_OF_A_TOKEN * max(most_tokens, _FEWEST_OF_A_PIECE)
    ids: list[int] = []
    for number, start in enumerate(range(0, len(text), size)):
        ids += encode(text[start : start + size])
        if len(ids) > most_tokens + _MORE_AT_A_CUT * number:
            return ids
    return None


def content_spans(
    render: Callable[[Sequence[Message]], str], messages: Sequence[Message], chosen: Sequence[int], text: str
) -> list[Span]:
    """Return the spans of the chosen messages' contents in `text`, the rendering of all messages.

    Raises:
        RenderError: A content does not appear exactly once, or other parts of the text depend on it.
    """
    spans = []
    for index in chosen:
        head, found, tail = render(with_changes(messages, index, content=_MARK)).partition(_MARK)
        end = len(text) - len(tail)
        if not found or _MARK in tail or end < len(head) or not (text.startswith(head) and text.endswith(tail)):
            raise RenderError(
                f"messages[{index}].content has the text of a control token, and the position of the content in the"
                " chat template's text cannot be found"
            )
        spans.append((len(head), end))
    return spans
