# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads and tokenizes a whole data set before training, and says what was left out."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Literal

from nemo_rl_moe.data.chat import TokenizedExample, batch_tokenizer
from nemo_rl_moe.data.loader import TokenStore
from nemo_rl_moe.data.records import BadLine, Example
from nemo_rl_moe.data.sources import BadLineLog, counted, open_source
from nemo_rl_moe.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


LINES_AT_ONCE = 1000

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class DataReport:
    """What became of a data set's lines.

    Attributes:
        name: The data set.
        num_examples: Examples to train on or to validate with.
        num_truncated: Those of them that were cut at the maximum length.
        num_dropped: Examples left out because nothing to train on stood before the cut.
        num_bad_lines: Lines left out because they could not be used.
        num_tokens: Tokens of all examples.
        num_trained_tokens: Those of them that count in the loss.
        bad_lines: The first of the bad lines, one text each.
    """

    name: str
    num_examples: int
    num_truncated: int
    num_dropped: int
    num_bad_lines: int
    num_tokens: int
    num_trained_tokens: int
    bad_lines: tuple[str, ...]

    def summary(self) -> str:
        """One line; what did not happen is not mentioned."""
        parts = [
            f"{counted(self.num_examples, 'example')}",
            f"{counted(self.num_tokens, 'token')} ({self.num_trained_tokens:,} to train on)",
        ]
        if self.num_truncated:
            parts.append(f"{self.num_truncated:,} cut at the maximum length")
        if self.num_dropped:
            parts.append(f"{self.num_dropped:,} left out: no response before the cut")
        if self.num_bad_lines:
            parts.append(f"{counted(self.num_bad_lines, 'bad line')} left out, the first: {self.bad_lines[0]}")
        return f"{self.name}: {', '.join(parts)}"


class TokenizedDataset(TokenStore):
    """The examples of a data set.

    Args:
        examples: The examples, in order.
        report: What was read and what was left out.
    """

    def __init__(self, examples: Sequence[TokenizedExample], report: DataReport):
        super().__init__(examples)
        self.report = report


def load_sft_dataset(
    path: str,
    split: str,
    tokenizer: "PreTrainedTokenizerBase",
    max_length: int,
    on_bad_line: Literal["stop", "skip"] = "stop",
    progress: Progress | None = None,
) -> TokenizedDataset:
    """Reads and tokenizes conversations for supervised fine-tuning.

    Args:
        path: A `.jsonl` file, or what `datasets` can load.
        split: The split to take; a `.jsonl` file has none and ignores it.
        tokenizer: A Hugging Face tokenizer.
        max_length: Tokens to keep of each example.
        on_bad_line: `stop` raises when the first bad line has been met and the rest has been looked through for more;
            `skip` leaves bad lines out and counts them.
        progress: Called now and then with the lines read so far and the lines in all.

    Raises:
        DataError: The data cannot be read; or it has bad lines, of which the first 20 are listed; or no example is
            left.
    """
    source = open_source(path, split)
    tokenize = batch_tokenizer(tokenizer, max_length)
    kept: list[TokenizedExample] = []
    bad = BadLineLog()
    num_dropped = num_read = 0
    while lines := list(islice(source.lines, LINES_AT_ONCE)):
        # Once the run is going to stop, only look for further bad lines.
        skip_tokens = bad.count > 0 and on_bad_line == "stop"
        for result in _read_lines(lines) if skip_tokens else _tokenize_lines(lines, tokenize):
            if isinstance(result, BadLine):
                bad.add(result)
            elif result.num_trained_tokens():
                kept.append(result)
            else:
                num_dropped += 1
        num_read += len(lines)
        if progress is not None:
            progress(num_read, source.num_lines)
    if on_bad_line == "stop":
        bad.raise_if_any(source.name)
    report = DataReport(
        name=source.name,
        num_examples=len(kept),
        num_truncated=sum(example.truncated for example in kept),
        num_dropped=num_dropped,
        num_bad_lines=bad.count,
        num_tokens=sum(len(example) for example in kept),
        num_trained_tokens=sum(example.num_trained_tokens() for example in kept),
        bad_lines=tuple(bad.shown),
    )
    if not kept:
        raise DataError([f"{source.name}: no example is left to use", *_why_none_is_left(report, max_length)])
    return TokenizedDataset(kept, report)


def _tokenize_lines(
    lines: Sequence[Example | BadLine],
    tokenize: Callable[[Sequence[Example]], list[TokenizedExample | BadLine]],
) -> Iterator[TokenizedExample | BadLine]:
    """The lines in their order, examples tokenized in one go."""
    tokenized = iter(tokenize([line for line in lines if isinstance(line, Example)]))
    return (line if isinstance(line, BadLine) else next(tokenized) for line in lines)


def _read_lines(lines: Sequence[Example | BadLine]) -> Iterator[BadLine]:
    return (line for line in lines if isinstance(line, BadLine))


def _why_none_is_left(report: DataReport, max_length: int) -> list[str]:
    reasons = list(report.bad_lines)
    if report.num_dropped:
        reasons.append(
            f"{report.name}: of {counted(report.num_dropped, 'example')} nothing to train on stands within "
            f"policy.max_total_sequence_length={max_length} tokens"
        )
    return reasons or [f"{report.name}: it has no lines"]
