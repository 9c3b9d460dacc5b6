# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Loading of examples, pairs or prompts before training, with a report on the data set's lines."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, Literal, TypeVar

from nemo_rl_moe.data.records import BadLine
from nemo_rl_moe.data.sources import LineSource, Parsed
from nemo_rl_moe.errors import DataError, counted

LINES_AT_ONCE = 1000
MAX_PROBLEMS_SHOWN = 20
MAX_PLACES_SHOWN = 5
_NUMBER = re.compile(r"\d[\d,.]*")

Item = TypeVar("Item")
OnBadLine = Literal["stop", "skip"]
Progress = Callable[[int, int], None]
"""A function that is called with the number of lines read so far and the total number of lines."""


@dataclass(frozen=True)
class ItemSize:
    """Size of one item. `num_images` is None if the model is text-only."""

    sample_id: str
    num_tokens: int
    num_trained_tokens: int = 0
    is_truncated: bool = False
    num_images: int | None = None
    notes: tuple[str, ...] = ()
    is_dropped: bool = False


@dataclass(frozen=True)
class CountedNote:
    """A note on kept items, with the number of these items and the sample id of the first one."""

    text: str
    count: int
    first: str

    def __str__(self) -> str:
        return f"{self.count:,} with {self.text} (the first: {self.first})"


@dataclass(frozen=True)
class ReportWords:
    """Words of the report for one kind of item.

    Attributes:
        noun: Singular name of an item, such as "pair".
        trained_tokens: Text after the number of trained tokens. None: this number is not reported.
    """

    noun: str
    trained_tokens: str | None
    dropped: str


@dataclass(frozen=True)
class DataReport:
    """Numbers of a data set's items that were kept, truncated or dropped, or that could not be read.

    Attributes:
        num_images: Number of images in kept items. None if the model is text-only.
        num_truncated: Number of kept items that were truncated at the maximum length.
        num_dropped: Number of items that were dropped for the reason in `words`.
        num_repeated: Number of prompts that were dropped because an equal prompt had been read or sampled before.
        num_training_prompts: Number of held-out prompts that were dropped because they are training prompts.
        first_truncated, first_dropped: Sample id of the first truncated item, and of the first dropped item.
        first_repeated, first_training_prompt: Sample id of the first such prompt, followed by the sample id of the
            prompt that it equals.
        bad_lines: A text for each cause: its first bad line, and the positions of a few others.
    """

    name: str
    words: ReportWords
    num_kept: int
    num_tokens: int = 0
    num_trained_tokens: int = 0
    num_images: int | None = None
    num_truncated: int = 0
    num_dropped: int = 0
    num_repeated: int = 0
    num_training_prompts: int = 0
    num_bad_lines: int = 0
    first_truncated: str | None = None
    first_dropped: str | None = None
    first_repeated: str | None = None
    first_training_prompt: str | None = None
    bad_lines: tuple[str, ...] = ()
    notes: tuple[CountedNote, ...] = ()

    def warnings(self) -> Iterator[str]:
        """Yield a warning if most items are truncated."""
        if self.num_truncated > self.num_kept / 2:
            which = "all" if self.num_truncated == self.num_kept else f"{self.num_truncated:,} of"
            yield (
                f"{self.name}: {which} {counted(self.num_kept, self.words.noun)} are truncated at"
                " policy.max_total_sequence_length: their further tokens are not trained on"
            )

    def summary(self) -> str:
        """Return the report as one line. Numbers that are 0 are omitted, except for the images of a vision model."""
        tokens = counted(self.num_tokens, "token")
        if self.words.trained_tokens is not None:
            tokens += f" ({self.num_trained_tokens:,} {self.words.trained_tokens})"
        parts = [counted(self.num_kept, self.words.noun), tokens]
        if self.num_images is not None:
            parts.append(counted(self.num_images, "image"))
        if self.num_truncated:
            parts.append(f"{self.num_truncated:,} truncated at the maximum length{_first(self.first_truncated)}")
        parts += map(str, self.notes)
        if self.num_dropped:
            parts.append(f"{self.num_dropped:,} left out: {self.words.dropped}{_first(self.first_dropped)}")
        if self.num_repeated:
            repeated = counted(self.num_repeated, f"repeated {self.words.noun}")
            parts.append(f"{repeated} left out{_first(self.first_repeated)}")
        if self.num_training_prompts:
            number, first = self.num_training_prompts, _first(self.first_training_prompt)
            parts.append(f"{number:,} left out: they are training prompts{first}")
        if self.num_bad_lines:
            parts.append(f"{counted(self.num_bad_lines, 'bad line')} left out, the first: {self.bad_lines[0]}")
        return f"{self.name}: {', '.join(parts)}"


def _first(place: str | None) -> str:
    return "" if place is None else f" (the first: {place})"


@dataclass(frozen=True)
class ItemKind(Generic[Parsed, Item]):
    """How one kind of item is tokenized, measured and reported.

    Attributes:
        tokenize: Function that returns, for each parsed line, an item or the problem.
        size_of: Function that returns the size of an item, and whether the item is dropped.
        why_none_is_left: Function from the number of dropped items, such as "3 prompts", to the error text if no item
            is left.
    """

    words: ReportWords
    tokenize: Callable[[Sequence[Parsed]], Sequence[Item | BadLine]]
    size_of: Callable[[Item], ItemSize]
    why_none_is_left: Callable[[str], str]


def read_items(
    source: LineSource[Parsed], kind: ItemKind[Parsed, Item], on_bad_line: OnBadLine, progress: Progress | None = None
) -> tuple[list[Item], DataReport]:
    """Read and tokenize a data set. Return the kept items, and the report.

    Args:
        on_bad_line: `stop` raises a `DataError` that lists all bad lines. `skip` counts bad lines in the report.
    """
    kept: list[Item] = []
    sizes: list[ItemSize] = []
    bad = _BadLines(source.name)
    dropped: list[str] = []
    num_read = 0
    while lines := list(islice(source.lines, LINES_AT_ONCE)):
        results: Iterable[Item | BadLine]
        if bad.count and on_bad_line == "stop":  # the error lists further bad lines, so good lines are not tokenized
            results = [line for line in lines if isinstance(line, BadLine)]
        else:
            results = _tokenized(lines, kind.tokenize)
        for result in results:
            if isinstance(result, BadLine):
                bad.add(result)
            elif (size := kind.size_of(result)).is_dropped:
                dropped.append(size.sample_id)
            else:
                kept.append(result)
                sizes.append(size)
        num_read += len(lines)
        if progress is not None:
            progress(num_read, source.num_lines)
    if on_bad_line == "stop" and bad.count:
        raise DataError(bad.problems())
    report = DataReport(
        name=source.name,
        words=kind.words,
        num_kept=len(kept),
        num_tokens=sum(size.num_tokens for size in sizes),
        num_trained_tokens=sum(size.num_trained_tokens for size in sizes),
        num_images=sum(size.num_images or 0 for size in sizes)
        if any(size.num_images is not None for size in sizes)
        else None,
        num_truncated=sum(size.is_truncated for size in sizes),
        num_dropped=len(dropped),
        first_truncated=next((size.sample_id for size in sizes if size.is_truncated), None),
        first_dropped=dropped[0] if dropped else None,
        num_bad_lines=bad.count,
        bad_lines=tuple(bad.shown()),
        notes=counted_notes((size.sample_id, size.notes) for size in sizes),
    )
    if not kept:
        reasons = bad.shown()
        if dropped:
            reasons.append(f"{source.name}: {kind.why_none_is_left(counted(len(dropped), kind.words.noun))}")
        first = f"{source.name}: no {kind.words.noun} is left to use"
        raise DataError([first, *(reasons or [f"{source.name}: it has no lines"])])
    return kept, report


def counted_notes(items: Iterable[tuple[str, Sequence[str]]]) -> tuple[CountedNote, ...]:
    """Return the notes with their numbers, in the order in which they first appear. `items` are sample ids with their
    notes."""
    places: dict[str, list[str]] = {}
    for place, notes in items:
        for note in notes:
            places.setdefault(note, []).append(place)
    return tuple(CountedNote(note, len(found), found[0]) for note, found in places.items())


class _BadLines:
    """Counts bad lines, and keeps the first 20 causes. Reasons that only differ in numbers are the same cause."""

    def __init__(self, name: str) -> None:
        self.count = 0
        self._name = name
        self._of_cause: dict[str, _Cause] = {}

    def add(self, line: BadLine) -> None:
        self.count += 1
        cause = _NUMBER.sub("0", line.reason)
        if cause in self._of_cause or len(self._of_cause) < MAX_PROBLEMS_SHOWN:
            self._of_cause.setdefault(cause, _Cause(line)).add(line.sample_id.removeprefix(f"{self._name}:"))

    def shown(self) -> list[str]:
        return [str(cause) for cause in self._of_cause.values()]

    def problems(self) -> list[str]:
        """Return the lines of the error for `data.on_bad_line: stop`."""
        more = self.count - sum(cause.count for cause in self._of_cause.values())
        last = [f"{self._name}: and {counted(more, 'more bad line')}"] if more else []
        return [*self.shown(), *last, f"{self._name}: data.on_bad_line=skip skips such lines and counts them"]


@dataclass
class _Cause:
    """Bad lines of one cause: the first line, their number, and the positions of the next few lines."""

    line: BadLine
    count: int = 0
    others: list[str] = field(default_factory=list)

    def add(self, place: str) -> None:
        self.count += 1
        if 1 < self.count <= 1 + MAX_PLACES_SHOWN:
            self.others.append(place)

    def __str__(self) -> str:
        if not self.others:
            return str(self.line)
        rest = ", ..." if self.count - 1 > len(self.others) else ""
        more = counted(self.count - 1, "more bad line")
        return f"{self.line} (and {more} like it: {', '.join(self.others)}{rest})"


def _tokenized(
    lines: Sequence[Parsed | BadLine], tokenize: Callable[[Sequence[Parsed]], Sequence[Item | BadLine]]
) -> Iterator[Item | BadLine]:
    """Yield the lines in order. The good lines are tokenized in one call."""
    items = iter(tokenize([line for line in lines if not isinstance(line, BadLine)]))
    return (line if isinstance(line, BadLine) else next(items) for line in lines)
