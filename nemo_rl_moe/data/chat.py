# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Tokenization of conversations: token ids, and a mask of the assistant's tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nemo_rl_moe.data.chat_template import renderer_for
from nemo_rl_moe.data.encoding import encode_each, most_characters
from nemo_rl_moe.data.image_files import StoredImage
from nemo_rl_moe.data.image_tokens import NO_IMAGES, RecordImages, SampleImages
from nemo_rl_moe.data.records import BadLine, Example
from nemo_rl_moe.data.speech import Speech, describe_speech
from nemo_rl_moe.data.template_inputs import NO_INPUTS, TemplateInputs
from nemo_rl_moe.data.template_renderer import Rendered
from nemo_rl_moe.data.turn_spans import Span

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MERGED = "tokens that would hold the end of a prompt and the start of a response: they are encoded one by one"
"""Note on an example, which messages print after the word "with"."""


@dataclass(frozen=True)
class TokenizedExample:
    """A tokenized conversation.

    Attributes:
        input_ids: Token ids, shape [tokens].
        token_mask: True at the assistant's tokens to train on, end tokens included. Shape [tokens].
        images: The sample's images. None if the model is text-only.
    """

    input_ids: NDArray[np.int32]
    token_mask: NDArray[np.bool_]
    truncated: bool
    sample_id: str
    images: SampleImages | None = None
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.input_ids)

    def num_trained_tokens(self) -> int:
        """Return the number of tokens in the loss. The first token of a sequence is not predicted, so it never
        counts."""
        return int(self.token_mask[1:].sum())

    @property
    def lacks_images(self) -> bool:
        """Whether truncation removed an image or a part of one."""
        return self.images is not None and self.images.end > len(self)


BatchTokenizer = Callable[[Sequence[Example]], list[TokenizedExample | BadLine]]


def batch_tokenizer(
    tokenizer: "PreTrainedTokenizerBase",
    max_length: int,
    run_wide: TemplateInputs = NO_INPUTS,
    images: RecordImages = NO_IMAGES,
    speech: Speech | None = None,
) -> BatchTokenizer:
    """Return a function that tokenizes conversations. It returns a `BadLine` for each conversation that it cannot
    tokenize.

    Without `speech`, the model's stop tokens come only from the tokenizer.
    """
    render = renderer_for(tokenizer, run_wide, (speech or describe_speech(tokenizer)).stop_texts)
    masked = _encode_with_offsets if tokenizer.is_fast else _encode_with_prefixes

    def tokenize(examples: Sequence[Example]) -> list[TokenizedExample | BadLine]:
        rendered = images.check(examples, render(examples))
        good = [_cut(item[0], max_length, item[1]) for item in rendered if not isinstance(item, str)]
        encoded = iter(encode_each(lambda items: masked(tokenizer, items), good, lambda item: len(item.text)))
        return [
            BadLine(example.sample_id, item)
            if isinstance(item, str)
            else _finish(example, item[0], next(encoded), max_length, images, item[1])
            for example, item in zip(examples, rendered, strict=True)
        ]

    return tokenize


def _cut(rendered: Rendered, max_length: int, stored: Sequence[StoredImage]) -> Rendered:
    """Return a rendering without the text far beyond the maximum length, so that tokenization stays cheap. Texts with
    images are not cut."""
    most = most_characters(max_length)
    if len(rendered.text) <= most or stored:
        return rendered
    spans = tuple((first, min(end, most)) for first, end in rendered.spans if first < most)
    return replace(rendered, text=rendered.text[:most], spans=spans)


@dataclass(frozen=True)
class _Encoded:
    """Tokens of a text and the mask of tokens in its spans, each of shape [tokens], with notes."""

    input_ids: NDArray[np.int32]
    token_mask: NDArray[np.bool_]
    notes: tuple[str, ...] = ()


def _finish(
    example: Example,
    rendered: Rendered,
    encoded: _Encoded | str,
    max_length: int,
    images: RecordImages,
    stored: tuple[StoredImage, ...],
) -> TokenizedExample | BadLine:
    if isinstance(encoded, str):
        return BadLine(example.sample_id, encoded)
    is_truncated = len(encoded.input_ids) > max_length or len(rendered.text) > most_characters(max_length)
    # Truncation may remove all trained tokens, but before it there must be some.
    if not encoded.token_mask[1:].any() and not (is_truncated and any(end > first for first, end in rendered.spans)):
        return BadLine(example.sample_id, "the chat template leaves no token of the assistant to train on")
    ids, mask, sample_images = encoded.input_ids, encoded.token_mask, None
    if images.tokens is not None:
        expanded = images.tokens.expand(ids, stored, max_length, example.sample_id)
        if isinstance(expanded, str):
            return BadLine(example.sample_id, expanded)
        ids, mask, sample_images = expanded.input_ids, np.repeat(mask, expanded.repeats), expanded.images
        is_truncated = len(ids) > max_length
    return TokenizedExample(
        # Copied, because a view would keep all tokens of the text in memory.
        ids[:max_length].copy(),
        mask[:max_length].copy(),
        is_truncated,
        example.sample_id,
        sample_images,
        (*rendered.notes, *encoded.notes),
    )


def _encode_with_offsets(tokenizer: "PreTrainedTokenizerBase", rendered: Sequence[Rendered]) -> list[_Encoded | str]:
    encoding: Any = tokenizer(
        [item.text for item in rendered],
        add_special_tokens=False,  # the rendered text already has special tokens
        return_offsets_mapping=True,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    results: list[_Encoded | str] = []
    for ids, pairs, item in zip(encoding["input_ids"], encoding["offset_mapping"], rendered, strict=True):
        offsets = np.asarray(pairs).reshape(-1, 2)
        results.append(
            _encode_apart(tokenizer, item, ids)
            if _reaches_over(offsets, item)
            else _Encoded(np.asarray(ids, dtype=np.int32), tokens_in_spans(offsets, item.spans))
        )
    return results


def _reaches_over(offsets: NDArray[np.int64], item: Rendered) -> bool:
    """Return whether a token may cross the border of a span. This includes borders at which no token is known to end,
    because some tokenizers give no offsets for blank space."""
    first, end = offsets[:, 0], offsets[:, 1]
    return any(
        bool(((first < border) & (border < end)).any()) or border not in end
        for border in {border for span in item.spans for border in span}
        if 0 < border < len(item.text)
    )


def _encode_apart(tokenizer: "PreTrainedTokenizerBase", item: Rendered, joint: Sequence[int]) -> _Encoded | str:
    """Encode each prompt and response separately, as in a rollout, or return the problem. `joint` are the tokens of the
    text encoded as one."""
    borders = sorted({0, len(item.text), *(border for span in item.spans for border in span)})
    ids: list[int] = []
    mask: list[bool] = []
    for first, end in pairwise(borders):
        piece = _ids_of(tokenizer, item.text[first:end])
        ids += piece
        mask += [any(start <= first and end <= stop for start, stop in item.spans)] * len(piece)
    is_same = ids == list(joint)
    # Some tokenizers add a blank at the beginning of each text, which changes the result.
    if not is_same and tokenizer.decode(ids) != tokenizer.decode(joint):
        return "a token of this tokenizer reaches over the border of an assistant turn"
    return _Encoded(np.asarray(ids, dtype=np.int32), np.asarray(mask, dtype=np.bool_), () if is_same else (MERGED,))


def _ids_of(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    encoding: Any = tokenizer(text, add_special_tokens=False, verbose=False)
    return list(encoding["input_ids"])


def tokens_in_spans(offsets: NDArray[np.int64], spans: Sequence[Span]) -> NDArray[np.bool_]:
    """Return a mask of the tokens that share a character with a span, of shape [tokens].

    Args:
        offsets: Start and end of each token in characters, of shape [tokens, 2]. For a token of blank space, some
            tokenizers give the end twice.
    """
    first, end = offsets[:, 0], offsets[:, 1]
    first = np.where(first == end, end - 1, first)
    inside = np.zeros(len(offsets), dtype=np.bool_)
    for span_first, span_end in spans:
        inside |= (first < span_end) & (end > span_first)
    return inside


def _encode_with_prefixes(tokenizer: "PreTrainedTokenizerBase", rendered: Sequence[Rendered]) -> list[_Encoded | str]:
    """Encode texts, and compute their masks by encoding prefixes. Used for Python tokenizers, which give no character
    offsets."""
    results: list[_Encoded | str] = []
    for item in rendered:
        ids = _ids_of(tokenizer, item.text)
        mask = np.zeros(len(ids), dtype=np.bool_)
        bounds = [[_ids_of(tokenizer, item.text[:border]) for border in span] for span in item.spans]
        if all(ids[: len(prefix)] == prefix for pair in bounds for prefix in pair):
            for before, up_to in bounds:
                mask[len(before) : len(up_to)] = True
            results.append(_Encoded(np.asarray(ids, dtype=np.int32), mask))
        else:
            results.append(_encode_apart(tokenizer, item, ids))
    return results
