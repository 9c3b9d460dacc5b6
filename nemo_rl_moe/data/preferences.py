# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Preference data, a prompt with a better and a worse response: parsing, tokenization and batches."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, overload

import numpy as np
import torch
from jaxtyping import Float

from nemo_rl_moe.data.chat import BatchTokenizer, TokenizedExample, batch_tokenizer
from nemo_rl_moe.data.dataset import DataReport, ItemKind, ItemSize, OnBadLine, ReportWords, read_items
from nemo_rl_moe.data.image_records import image_columns
from nemo_rl_moe.data.image_tokens import NO_IMAGES, RecordImages, num_images_of
from nemo_rl_moe.data.loader import TokenStore, collate
from nemo_rl_moe.data.margins import MARGINS, Margins
from nemo_rl_moe.data.messages import SYSTEM_ROLES, Message, parse_turns
from nemo_rl_moe.data.record_forms import (
    MORE_KEYS,
    NO_KEYS,
    PAIR_KEYS,
    RESPONSE_KEYS,
    FormOfLines,
    Keys,
    is_text_of_turns,
    own_pair,
    turns_before,
    turns_of_prompt,
)
from nemo_rl_moe.data.record_values import RecordError, columns_of, kind_of, names_in
from nemo_rl_moe.data.records import BadLine, Example, behind, trained_example, with_images
from nemo_rl_moe.data.sources import open_lines
from nemo_rl_moe.data.speech import Speech
from nemo_rl_moe.data.template_inputs import NO_INPUTS, TEMPLATE_COLUMNS, TemplateInputs, parse_template_inputs
from nemo_rl_moe.data.training_marks import take_training_marks
from nemo_rl_moe.distributed.batch import TokenBatch, per_sequence
from nemo_rl_moe.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


RESPONSES = ("chosen", "rejected")
_OTHER_KEYS = "to use other keys, set data.chosen_key and data.rejected_key"


@dataclass(frozen=True)
class PreferenceRecord:
    """Two responses to one prompt. Both examples include the prompt.

    Attributes:
        margin: See `PreferencePair`.
    """

    sample_id: str
    chosen: Example
    rejected: Example
    margin: float | None = None


def parse_preference(
    record: object,
    sample_id: str,
    image_key: str | None = None,
    keys: Keys = NO_KEYS,
    form: FormOfLines | None = None,
    margins: Margins | None = None,
) -> PreferenceRecord:
    """Parse one decoded record.

    `prompt`, `chosen` and `rejected` are each a text or a list of messages. If both responses repeat the prompt, it
    counts once. Without `prompt`, the prompt is the messages with which both responses begin. Other usual keys are
    accepted too (`record_forms.py`). `tools` and `chat_template_kwargs` are passed to the chat template. Further keys
    are ignored.

    Args:
        image_key: Key of the prompt's images next to the messages. None: such images are not read.
        form: Keys of the earlier lines, which this line must have too.
        margins: How margins are read. None: not at all.
    """
    if not isinstance(record, Mapping):
        raise RecordError(f"the line is {kind_of(record)}, expected an object with prompt, chosen and rejected")
    margin = None if margins is None else margins.margin_of(record)
    formed = own_pair(record, keys)
    record = formed.record
    missing = [formed.name(name) for name in RESPONSES if record.get(name) is None]
    if missing:
        raise RecordError(
            f"the line has no {' and no '.join(missing)}; its keys: {names_in(formed.keys())}; {_OTHER_KEYS}"
        )
    is_of_turns = is_text_of_turns(record.get("prompt"))

    def response(own: str) -> list[Message]:
        value = record[own]
        said = value.strip() if is_of_turns and isinstance(value, str) else value
        return parse_turns(said, formed.name(own), "assistant")

    chosen, rejected = response("chosen"), response("rejected")
    prompt = shared = _shared(chosen, rejected)
    if record.get("prompt") is not None:
        own = formed.name("prompt")
        prompt = parse_turns(turns_of_prompt(record["prompt"], own), own, "user")
    if not prompt:
        raise RecordError(
            "the line has no prompt, and chosen and rejected do not begin with the same messages; to use another key as"
            " prompt, set data.prompt_key"
        )
    if _are_same(shared[-len(prompt) :], prompt):  # both responses repeat the prompt, perhaps after a system turn
        prompt = shared
    if len(prompt) > 1 and _are_same(prompt[-1:], chosen):  # the prompt's messages end with the better response
        prompt = prompt[:-1]
    if _are_same(chosen[: len(prompt)], prompt) and _are_same(rejected[: len(prompt)], prompt):
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    if chosen == rejected:
        raise RecordError("chosen and rejected are the same: there is nothing to prefer")
    before = turns_before(formed, keys)
    prompt = behind(before, prompt)
    texts = [record.get(name) for name in ("prompt", *RESPONSES)]
    plain = [str(text) for text in texts] if all(isinstance(text, str) for text in texts) and not before else None
    inputs = parse_template_inputs(record)

    def example(name: str, response: Sequence[Message], plain_response: str) -> Example:
        if not any(message["role"] == "assistant" for message in response):
            raise RecordError(f"{name} has no assistant turn: there is no response")
        _require_in_turn(prompt, formed.name("prompt"), response, formed.name(name))
        both = (plain[0], plain_response) if plain else None
        # Images next to the messages belong to the prompt.
        shown, images = with_images(prompt, record, image_key, sample_id)
        answer, later = with_images(response, {}, image_key, sample_id)
        unmarked, context = take_training_marks([*shown, *answer], f"prompt and {name}")
        return trained_example(
            Example(f"{sample_id} ({name})", tuple(unmarked), len(prompt), both, inputs, (*images, *later), context)
        )

    pair = PreferenceRecord(
        sample_id,
        example("chosen", chosen, plain[1] if plain else ""),
        example("rejected", rejected, plain[2] if plain else ""),
        margin,
    )
    if form is not None:
        # Sorted, because if a number compares the responses, either of them may be the better one.
        responses = " and ".join(sorted(map(formed.name, RESPONSES)))
        form.require_same({"data.chosen_key and data.rejected_key": responses}, sample_id)
        if margins is not None:
            form.require_same({"data.margin_key": "no margin" if margin is None else "a margin"}, sample_id)
    return pair


def pair_parser(
    image_key: str | None, keys: Keys, margins: Margins | None = None
) -> Callable[[object, str], PreferenceRecord]:
    """Return a function that parses the records of one data set. All records must have the same keys."""
    return partial(parse_preference, image_key=image_key, keys=keys, form=FormOfLines(), margins=margins)


def preference_columns(
    path: str,
    names: Sequence[str],
    image_key: str | None = None,
    keys: Keys = NO_KEYS,
    margins: Margins | None = None,
) -> list[str]:
    """Return the columns to read, out of the columns `names` of a table. Raises `DataError` if it has no responses."""
    named = columns_of(path, names, {f"data.{own}_key": key for own, key in keys.items()})
    if not named and not any(name in names for name in RESPONSE_KEYS):
        raise DataError(f"{path}: has no chosen and rejected; its columns: {names_in(names)}; {_OTHER_KEYS}")
    of_margin = () if margins is None else margins.columns(path, names)
    wanted = (*named, *PAIR_KEYS, *MORE_KEYS, *TEMPLATE_COLUMNS, *image_columns(names, image_key), *of_margin)
    return [name for name in dict.fromkeys(wanted) if name in names]


def _shared(chosen: Sequence[Message], rejected: Sequence[Message]) -> list[Message]:
    """Return the messages with which both lists begin, without the last message of either."""
    shared = 0
    while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
        shared += 1
    return list(chosen[:shared])


def _are_same(messages: Sequence[Message], others: Sequence[Message]) -> bool:
    """Return whether messages are the same apart from blank space around their texts."""
    return [_bare(message) for message in messages] == [_bare(message) for message in others]


def _bare(message: Message) -> Message:
    content = message["content"]
    return {**message, "content": content.strip() if isinstance(content, str) else content}


def _require_in_turn(prompt: Sequence[Message], prompt_name: str, response: Sequence[Message], name: str) -> None:
    """Raise `RecordError` if a response begins with a system turn, or with the role with which the prompt ends."""
    last, first = prompt[-1]["role"], response[0]["role"]
    if first in SYSTEM_ROLES or (last == first and first in ("user", "assistant")):
        raise RecordError(
            f"{prompt_name} ends in a turn of role {last}, and {name} begins with one of role {first}: the prompt"
            " must contain all messages before the responses, and the responses must not repeat them"
        )


REFERENCE_SUMS = "reference_sums"
"""Name of the batch column with the reference model's log-probability of each sequence's response, in nats."""


@dataclass(frozen=True)
class PreferencePair:
    """Two responses to one prompt, tokenized.

    Attributes:
        margin: Number by which the chosen response's score should at least exceed the rejected one's. None: not given.
        reference_sums: Log-probability of the chosen and the rejected response under the reference model, in nats.
            None: not computed.
    """

    chosen: TokenizedExample
    rejected: TokenizedExample
    reference_sums: tuple[float, float] | None = None
    margin: float | None = None


WORDS = ReportWords("pair", "of responses", "no two different responses before truncation")
WORDS_WITH_IMAGES = replace(WORDS, dropped="no two different responses, or not all images, before truncation")


class PreferenceDataset(Sequence[PreferencePair]):
    """Sequence of pairs, stored in few flat arrays. `examples` alternates between the chosen and the rejected sequence
    of each pair."""

    def __init__(
        self,
        examples: TokenStore,
        report: DataReport,
        reference_sums: Float[np.ndarray, "pairs 2"] | None = None,
        margins: Sequence[float | None] | None = None,
    ):
        self.report = report
        self._examples = examples
        self._reference_sums = reference_sums
        self._margins = margins

    def __len__(self) -> int:
        return len(self._examples) // 2

    @overload
    def __getitem__(self, index: int) -> PreferencePair: ...
    @overload
    def __getitem__(self, index: slice) -> list[PreferencePair]: ...
    def __getitem__(self, index: int | slice) -> PreferencePair | list[PreferencePair]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = range(len(self))[index]  # takes negative indices, and raises IndexError past the end
        margin = None if self._margins is None else self._margins[position]
        pair = PreferencePair(self._examples[2 * position], self._examples[2 * position + 1], margin=margin)
        if self._reference_sums is None:
            return pair
        chosen, rejected = self._reference_sums[position].tolist()
        return replace(pair, reference_sums=(chosen, rejected))

    def with_reference_sums(self, sums: Float[np.ndarray, "pairs 2"]) -> "PreferenceDataset":
        """Return the pairs with these log-probabilities of their responses under the reference model."""
        return PreferenceDataset(self._examples, self.report, sums, self._margins)


def load_preferences(
    path: str,
    split: str,
    tokenizer: "PreTrainedTokenizerBase",
    max_length: int,
    on_bad_line: OnBadLine = "stop",
    run_wide: TemplateInputs = NO_INPUTS,
    images: RecordImages = NO_IMAGES,
    speech: Speech | None = None,
    keys: Keys = NO_KEYS,
    margins: Margins | None = None,
) -> PreferenceDataset:
    """Read, tokenize and return pairs of responses.

    Args:
        path: A file of text, or a data set that `datasets` can load.
        max_length: Maximum number of tokens of each sequence, prompt and response together.
        speech: See `batch_tokenizer`.
        margins: How margins are read. None: not at all.
    """
    tokenize = batch_tokenizer(tokenizer, max_length, run_wide, images, speech)
    source = open_lines(
        path,
        split,
        pair_parser(images.key, keys, margins),
        partial(preference_columns, image_key=images.key, keys=keys, margins=margins),
    )
    kind: ItemKind[PreferenceRecord, PreferencePair] = ItemKind(
        WORDS if images.tokens is None else WORDS_WITH_IMAGES,
        lambda records: _tokenized_pairs(records, tokenize),
        _size_of,
        lambda dropped: (
            f"of {dropped} no two different responses{' with all images' if images.tokens is not None else ''} fit into"
            f" policy.max_total_sequence_length={max_length} tokens"
        ),
    )
    pairs, report = read_items(source, kind, on_bad_line)
    examples = TokenStore([example for pair in pairs for example in (pair.chosen, pair.rejected)])
    return PreferenceDataset(examples, report, margins=[pair.margin for pair in pairs])


def collate_pairs(pairs: Sequence[PreferencePair], pad_token_id: int) -> TokenBatch:
    """Return a batch of pairs, padded to the longest sequence. Each chosen sequence precedes its rejected sequence."""
    batch = collate([example for pair in pairs for example in (pair.chosen, pair.rejected)], pad_token_id)
    sums = [pair.reference_sums for pair in pairs if pair.reference_sums is not None]
    values = torch.tensor(sums, dtype=torch.float64).flatten()
    columns = {REFERENCE_SUMS: per_sequence(values)} if sums else {}
    margins = [pair.margin for pair in pairs if pair.margin is not None]
    if margins:
        columns[MARGINS] = per_sequence(torch.tensor(margins, dtype=torch.float64).repeat_interleave(2))
    return replace(batch.with_columns(**columns), group_size=2)


def _tokenized_pairs(records: Sequence[PreferenceRecord], tokenize: BatchTokenizer) -> list[PreferencePair | BadLine]:
    sequences = tokenize([example for record in records for example in (record.chosen, record.rejected)])
    return [
        chosen
        if isinstance(chosen, BadLine)
        else rejected
        if isinstance(rejected, BadLine)
        else PreferencePair(chosen, rejected, margin=record.margin)
        for record, chosen, rejected in zip(records, sequences[::2], sequences[1::2], strict=True)
    ]


def _size_of(pair: PreferencePair) -> ItemSize:
    """Return the size of both sequences together. A pair is dropped if truncation leaves no two different responses."""
    chosen, rejected = pair.chosen, pair.rejected
    trained = [sequence.num_trained_tokens() for sequence in (chosen, rejected)]
    is_dropped = (
        any(sequence.lacks_images for sequence in (chosen, rejected))
        or not all(trained)
        or np.array_equal(chosen.input_ids, rejected.input_ids)
    )
    return ItemSize(
        chosen.sample_id.removesuffix(f" ({RESPONSES[0]})"),
        len(chosen) + len(rejected),
        sum(trained),
        chosen.truncated or rejected.truncated,
        num_images_of(chosen.images),
        tuple(dict.fromkeys(chosen.notes + rejected.notes)),
        is_dropped=is_dropped,
    )
