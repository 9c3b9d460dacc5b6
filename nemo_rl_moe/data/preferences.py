# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""One line of preference data: a prompt with a better and a worse response, and what is wrong when it is not."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Literal, overload

import numpy as np
import torch
from jaxtyping import Float

from nemo_rl_moe.data.chat import BatchTokenizer, TokenizedExample, batch_tokenizer
from nemo_rl_moe.data.loader import TokenStore, collate
from nemo_rl_moe.data.records import BadLine, Example, Message, RecordError, kind_of, parse_turns
from nemo_rl_moe.data.sft import LINES_AT_ONCE
from nemo_rl_moe.data.sources import BadLineLog, counted, open_lines
from nemo_rl_moe.distributed.batch import TokenBatch, per_sequence
from nemo_rl_moe.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


PREFERENCE_COLUMNS = ("prompt", "chosen", "rejected")
RESPONSES = ("chosen", "rejected")


@dataclass(frozen=True)
class PreferenceRecord:
    """Two responses to one prompt.

    Attributes:
        sample_id: Where it came from: `file:line`, or `dataset[split]:row`.
        chosen: The prompt with the better response.
        rejected: The prompt with the worse one.
    """

    sample_id: str
    chosen: Example
    rejected: Example


def parse_preference(record: object, sample_id: str) -> PreferenceRecord:
    """Checks one decoded record and gives it the shape that the rest of the package works with.

    `prompt`, `chosen` and `rejected` are each a text or a list of messages. Where both responses repeat the prompt, as
    in data sets that hold whole conversations, it counts once; where there is no `prompt`, it is the messages that both
    conversations begin with. Further keys are ignored.

    Raises:
        RecordError: The record cannot be used.
    """
    if not isinstance(record, Mapping):
        raise RecordError(f"the line is {kind_of(record)}, expected an object with prompt, chosen and rejected")
    missing = [name for name in RESPONSES if record.get(name) is None]
    if missing:
        keys = ", ".join(str(key) for key in record) or "none"
        raise RecordError(f"the line has no {' and no '.join(missing)}; its keys: {keys}")
    chosen = parse_turns(record["chosen"], "chosen", "assistant")
    rejected = parse_turns(record["rejected"], "rejected", "assistant")
    prompt = _prompt_of(record, chosen, rejected)
    if chosen[: len(prompt)] == prompt == rejected[: len(prompt)]:
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    if chosen == rejected:
        raise RecordError("chosen and rejected are the same: there is nothing to prefer")
    texts = [record.get(name) for name in PREFERENCE_COLUMNS]
    plain = [str(text) for text in texts] if all(isinstance(text, str) for text in texts) else None
    return PreferenceRecord(
        sample_id,
        _example(sample_id, "chosen", prompt, chosen, (plain[0], plain[1]) if plain else None),
        _example(sample_id, "rejected", prompt, rejected, (plain[0], plain[2]) if plain else None),
    )


def preference_columns(path: str, names: Sequence[str]) -> list[str]:
    """Which columns of a table to read.

    Raises:
        DataError: It has no pairs.
    """
    if any(name not in names for name in RESPONSES):
        raise DataError(f"{path}: has no chosen and rejected; its columns: {', '.join(names) or 'none'}")
    return [name for name in PREFERENCE_COLUMNS if name in names]


def _prompt_of(
    record: Mapping[str, object], chosen: Sequence[Message], rejected: Sequence[Message]
) -> Sequence[Message]:
    if record.get("prompt") is not None:
        return parse_turns(record["prompt"], "prompt", "user")
    shared = 0
    # The last turn of each is its response, whatever stands before it.
    while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
        shared += 1
    if not shared:
        raise RecordError("the line has no prompt, and chosen and rejected do not begin with the same messages")
    return list(chosen[:shared])


def _example(
    sample_id: str, name: str, prompt: Sequence[Message], response: Sequence[Message], plain: tuple[str, str] | None
) -> Example:
    if not any(message["role"] == "assistant" for message in response):
        raise RecordError(f"{name} has no assistant turn: there is no response")
    return Example(f"{sample_id} ({name})", (*prompt, *response), len(prompt), plain)


REFERENCE_SUMS = "reference_sums"
"""The batch's extra that holds, for each sequence, the reference's log-probability of its response."""


@dataclass(frozen=True)
class PreferencePair:
    """Two responses to one prompt as the model sees them.

    Attributes:
        chosen: The prompt with the better response.
        rejected: The prompt with the worse one.
        reference_sums: Log-probability of each response under the reference model, in nats; None: not known.
    """

    chosen: TokenizedExample
    rejected: TokenizedExample
    reference_sums: tuple[float, float] | None = None


@dataclass(frozen=True)
class PreferenceReport:
    """What became of a data set's lines.

    Attributes:
        name: The data set.
        num_pairs: Pairs to train on or to validate with.
        num_truncated: Those of them with a sequence that was cut at the maximum length.
        num_dropped: Pairs left out because before the cut a response has no token, or both are the same.
        num_bad_lines: Lines left out because they could not be used.
        num_tokens: Tokens of all sequences.
        num_trained_tokens: Those of them that belong to a response.
        bad_lines: The first of the bad lines, one text each.
    """

    name: str
    num_pairs: int
    num_truncated: int
    num_dropped: int
    num_bad_lines: int
    num_tokens: int
    num_trained_tokens: int
    bad_lines: tuple[str, ...]

    def summary(self) -> str:
        """One line; what did not happen is not mentioned."""
        parts = [
            counted(self.num_pairs, "pair"),
            f"{counted(self.num_tokens, 'token')} ({self.num_trained_tokens:,} of responses)",
        ]
        if self.num_truncated:
            parts.append(f"{self.num_truncated:,} cut at the maximum length")
        if self.num_dropped:
            parts.append(f"{self.num_dropped:,} left out: no two different responses before the cut")
        if self.num_bad_lines:
            parts.append(f"{counted(self.num_bad_lines, 'bad line')} left out, the first: {self.bad_lines[0]}")
        return f"{self.name}: {', '.join(parts)}"


class PreferenceDataset(Sequence[PreferencePair]):
    """A list of pairs that is kept in few flat arrays.

    Args:
        examples: The sequences in the order of the pairs, the chosen before the rejected one.
        report: What was read and what was left out.
        reference_sums: Log-probability of each response under the reference model, in nats; None: not known. NaN where
            a pair has none.
    """

    def __init__(
        self,
        examples: TokenStore,
        report: PreferenceReport,
        reference_sums: Float[np.ndarray, "pairs 2"] | None = None,
    ):
        self.report = report
        self._examples = examples
        self._reference_sums = reference_sums

    def __len__(self) -> int:
        return len(self._examples) // 2

    @overload
    def __getitem__(self, index: int) -> PreferencePair: ...
    @overload
    def __getitem__(self, index: slice) -> list[PreferencePair]: ...
    def __getitem__(self, index: int | slice) -> PreferencePair | list[PreferencePair]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = range(len(self))[index]  # knows negative indices, and raises IndexError past the end
        pair = PreferencePair(self._examples[2 * position], self._examples[2 * position + 1])
        if self._reference_sums is None:
            return pair
        chosen, rejected = self._reference_sums[position].tolist()
        return replace(pair, reference_sums=(chosen, rejected))

    def with_reference_sums(self, sums: Float[np.ndarray, "pairs 2"]) -> "PreferenceDataset":
        """The same pairs, each with what the reference model gives its responses."""
        return PreferenceDataset(self._examples, self.report, sums)


def load_preferences(
    path: str,
    split: str,
    tokenizer: "PreTrainedTokenizerBase",
    max_length: int,
    on_bad_line: Literal["stop", "skip"] = "stop",
) -> PreferenceDataset:
    """Reads and tokenizes pairs of responses.

    Args:
        path: A `.jsonl` file, or what `datasets` can load.
        split: The split to take; a `.jsonl` file has none and ignores it.
        tokenizer: A Hugging Face tokenizer.
        max_length: Tokens to keep of each sequence, prompt and response together.
        on_bad_line: `stop` raises when all lines have been looked at; `skip` leaves bad lines out and counts them.

    Raises:
        DataError: The data cannot be read; or it has bad lines, of which the first 20 are listed; or no pair is left.
    """
    source = open_lines(path, split, parse_preference, preference_columns)
    tokenize = batch_tokenizer(tokenizer, max_length)
    kept: list[TokenizedExample] = []
    bad = BadLineLog()
    num_dropped = 0
    while lines := list(islice(source.lines, LINES_AT_ONCE)):
        for result in _tokenize_lines(lines, tokenize):
            if isinstance(result, BadLine):
                bad.add(result)
            elif _teaches(*result):
                kept += result
            else:
                num_dropped += 1
    if on_bad_line == "stop":
        bad.raise_if_any(source.name)
    report = PreferenceReport(
        name=source.name,
        num_pairs=len(kept) // 2,
        num_truncated=sum(a.truncated or b.truncated for a, b in zip(kept[::2], kept[1::2], strict=True)),
        num_dropped=num_dropped,
        num_bad_lines=bad.count,
        num_tokens=sum(len(example) for example in kept),
        num_trained_tokens=sum(example.num_trained_tokens() for example in kept),
        bad_lines=tuple(bad.shown),
    )
    if not kept:
        raise DataError([f"{source.name}: no pair is left to use", *_why_none_is_left(report, max_length)])
    return PreferenceDataset(TokenStore(kept), report)


def collate_pairs(pairs: Sequence[PreferencePair], pad_token_id: int) -> TokenBatch:
    """Pads pairs on the right to the longest sequence of all; a pair's sequences are neighbours, the chosen one first.

    Args:
        pairs: At least one.
        pad_token_id: What stands after a sequence's end.
    """
    batch = collate([example for pair in pairs for example in (pair.chosen, pair.rejected)], pad_token_id)
    sums = [pair.reference_sums for pair in pairs if pair.reference_sums is not None]
    values = torch.tensor(sums, dtype=torch.float64).flatten()
    columns = {REFERENCE_SUMS: per_sequence(values)} if sums else {}
    return replace(batch, columns=columns, group_size=2)


def _tokenize_lines(
    lines: Sequence[PreferenceRecord | BadLine], tokenize: BatchTokenizer
) -> Iterator[tuple[TokenizedExample, TokenizedExample] | BadLine]:
    """The lines in their order, all sequences tokenized in one go."""
    records = [line for line in lines if isinstance(line, PreferenceRecord)]
    tokenized = iter(tokenize([example for record in records for example in (record.chosen, record.rejected)]))
    for line in lines:
        if isinstance(line, BadLine):
            yield line
            continue
        chosen, rejected = next(tokenized), next(tokenized)
        if isinstance(chosen, BadLine):
            yield chosen
        elif isinstance(rejected, BadLine):
            yield rejected
        else:
            yield chosen, rejected


def _teaches(chosen: TokenizedExample, rejected: TokenizedExample) -> bool:
    """Whether two different responses are left of a pair."""
    both_answer = bool(chosen.num_trained_tokens() and rejected.num_trained_tokens())
    return both_answer and not np.array_equal(chosen.input_ids, rejected.input_ids)


def _why_none_is_left(report: PreferenceReport, max_length: int) -> list[str]:
    reasons = list(report.bad_lines)
    if report.num_dropped:
        reasons.append(
            f"{report.name}: of {counted(report.num_dropped, 'pair')} no two different responses stand within "
            f"policy.max_total_sequence_length={max_length} tokens"
        )
    return reasons or [f"{report.name}: it has no lines"]
