# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Sources of records: JSONL files and data sets that the `datasets` library reads, with a time limit on reading."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from nemo_rl_moe.alarms import TimeIsUp, interrupted_after
from nemo_rl_moe.config.suggestions import did_you_mean, nearest
from nemo_rl_moe.data.image_records import image_columns
from nemo_rl_moe.data.record_values import RecordError, names_in, unique_keys
from nemo_rl_moe.data.records import CONVERSATIONS, SYSTEM, BadLine, Example, parse_record
from nemo_rl_moe.data.template_inputs import TEMPLATE_COLUMNS
from nemo_rl_moe.errors import DataError, one_line
from nemo_rl_moe.models.hub import hub_or_cache_alone, hub_silence

if TYPE_CHECKING:
    from datasets import Dataset


Parsed = TypeVar("Parsed")

_BLOCK_BYTES = 1 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def count_lines(path: Path) -> int:
    """Count the lines of a file, the last one with or without its newline.

    Raises:
        DataError: The file cannot be read.
    """
    count, last = 0, b"\n"
    try:
        with path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                count, last = count + block.count(b"\n"), block[-1:]
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    return count + (last != b"\n")


def read_jsonl(path: Path, parse: Callable[[object, str], Parsed]) -> Iterator[Parsed | BadLine]:
    """Yield the record of each line, or a `BadLine`.

    Lines end at the newline byte only: JSON allows Unicode's other separators inside a string.

    Args:
        parse: Takes a decoded line and its `file:line`; raises `RecordError`.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            sample_id = f"{path}:{number}"
            try:
                yield parse(_decode(line, is_first=number == 1), sample_id)
            except RecordError as error:
                yield BadLine(sample_id, str(error))
            except RecursionError:
                yield BadLine(sample_id, "the record is nested too deeply")


def read_text(path: Path, key: str, parse: Callable[[object, str], Parsed]) -> Iterator[Parsed | BadLine]:
    """Read a plain text file, each line as a record with one key.

    Args:
        parse: Takes a record and its `file:line`; raises `RecordError`.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            sample_id = f"{path}:{number}"
            try:
                yield parse({key: _text(line, is_first=number == 1)}, sample_id)
            except RecordError as error:
                yield BadLine(sample_id, str(error))


def _text(line: bytes, *, is_first: bool) -> str:
    """Return the text of a line, without its end."""
    if is_first:
        line = line.removeprefix(_BYTE_ORDER_MARK)
    if not line.strip():
        raise RecordError("the line is empty")
    try:
        return line.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise RecordError(f"not valid UTF-8: {_bad_byte(error)}") from None


def _bad_byte(error: UnicodeDecodeError) -> str:
    return f"byte 0x{error.object[error.start]:02x} at byte {error.start + 1}"


def _decode(line: bytes, *, is_first: bool) -> object:
    text = _text(line, is_first=is_first)  # with its end, a line that is cut short would end in column 1 of the next
    try:
        return json.loads(text, object_pairs_hook=unique_keys)
    except RecordError:
        raise
    except json.JSONDecodeError as error:
        raise RecordError(f"not valid JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise RecordError("not valid JSON: nested too deeply") from None
    except ValueError as error:  # a number with thousands of digits
        raise RecordError(f"not valid JSON: {error}") from None


_BUILDER_OF_SUFFIX = {".parquet": "parquet", ".json": "json", ".csv": "csv", ".arrow": "arrow"}


def load_table(path: str, split: str) -> "Dataset":
    """Load the rows of one split.

    Args:
        path: A hub's name, a folder of data files or of `save_to_disk`, or a data file.

    Raises:
        DataError: There is no such dataset or split.
    """
    from datasets import Dataset

    table = _load(path, split)
    if not isinstance(table, Dataset):
        raise DataError(f"{path}: split {split!r} is {type(table).__name__}, expected one table of rows")
    return table


def read_table(
    table: "Dataset", path: str, split: str, parse: Callable[[object, str], Parsed]
) -> Iterator[Parsed | BadLine]:
    """Yield the record of each row (counted from 0), or a `BadLine`.

    Args:
        path: For error messages.
        parse: Takes a row and its `path[split]:row`; raises `RecordError`.
    """
    for number, row in enumerate(_rows(table)):
        sample_id = f"{path}[{split}]:{number}"
        try:
            if isinstance(row, RecordError):
                raise row
            yield parse(row, sample_id)
        except RecordError as error:
            yield BadLine(sample_id, str(error))


def _rows(table: "Dataset") -> "Iterator[dict[str, Any] | RecordError]":
    """Yield the rows in order; for a row with values that Python cannot represent, the reason."""
    number = 0
    has_images = "Image(" in str(table.features)
    while number < len(table):
        try:
            rest = table.select(range(number, len(table)))
            # `datasets` decodes images, however large; they are wanted as they are.
            for row in (one.to_pylist()[0] for one in rest.with_format("arrow")) if has_images else rest:
                yield row
                number += 1
        except UnicodeDecodeError as error:
            yield RecordError(f"not valid UTF-8: {_bad_byte(error)} of a text")
        except (ValueError, OverflowError) as error:  # such as a time before the year 1
            yield RecordError(f"the row cannot be read: {one_line(error)}")
        number += 1


def _load(path: str, split: str) -> Any:
    from datasets import DatasetDict, load_dataset, load_from_disk
    from datasets.exceptions import DatasetGenerationError

    local = Path(path)
    saved = (local / "dataset_dict.json").is_file() or (local / "state.json").is_file()
    try:
        if saved:
            loaded: Any = load_from_disk(path)
        elif local.is_file():
            builder = _BUILDER_OF_SUFFIX.get(local.suffix)
            if builder is None:
                allowed = ", ".join((".jsonl", *_BUILDER_OF_SUFFIX))
                raise DataError(f"{path}: a file that ends in {local.suffix or 'no suffix'}, expected one of {allowed}")
            loaded = load_dataset(builder, data_files=path)
        else:
            with nullcontext() if local.is_dir() else hub_or_cache_alone():
                loaded = load_dataset(path)
    except DataError:
        raise
    except Exception as error:  # the library raises dozens of types, of its own, the hub's and the file formats'
        if not local.exists() and (silence := hub_silence()) is not None:
            raise DataError(
                f"{path}: cannot be had from the hub ({silence}), nor from its cache: {one_line(error)}"
            ) from error
        # This one says nothing but that there was another.
        cause = error.__cause__ if isinstance(error, DatasetGenerationError) and error.__cause__ else error
        raise DataError(f"{path}: datasets cannot load it: {one_line(cause)}") from error
    if not isinstance(loaded, DatasetDict):
        return loaded
    if split not in loaded:
        hint = did_you_mean(nearest(split, list(loaded)))
        raise DataError(f"{path}: has no split {split!r}; its splits: {', '.join(loaded)}{hint}")
    return loaded[split]


EXAMPLE_COLUMNS = ("messages", CONVERSATIONS, "prompt", "completion")

Parse = Callable[[object, str], Parsed]
ChooseColumns = Callable[[str, Sequence[str]], Sequence[str]]


@dataclass(frozen=True)
class LineSource(Generic[Parsed]):
    """An opened data set.

    Attributes:
        num_lines: Good and bad lines or rows.
        lines: Can be read once.
    """

    name: str
    num_lines: int
    lines: Iterator[Parsed | BadLine]


def open_source(path: str, split: str, image_key: str | None = None) -> LineSource[Example]:
    """Open examples for supervised fine-tuning.

    Args:
        image_key: Key of images beside the messages; None: they are not read.

    Raises:
        DataError: There is nothing that can be read.
    """
    columns = partial(_example_columns, image_key=image_key)
    return open_lines(path, split, partial(parse_record, image_key=image_key), columns)


def open_lines(path: str, split: str, parse: Parse[Parsed], choose_columns: ChooseColumns) -> LineSource[Parsed]:
    """Open a `.jsonl` file, or a data set that `datasets` can load.

    Args:
        split: Ignored for a `.jsonl` file.
        parse: Takes a decoded line and its place; raises `RecordError`.
        choose_columns: Takes path and columns of a table; returns those to read, or raises `DataError`.

    Raises:
        DataError: There is nothing that can be read.
    """
    if path.endswith(".jsonl"):
        return LineSource(path, count_lines(Path(path)), read_jsonl(Path(path), parse))
    table = load_table(path, split)
    table = table.select_columns(list(choose_columns(path, table.column_names)))
    return LineSource(f"{path}[{split}]", len(table), read_table(table, path, split, parse))


TEXT_SUFFIX = ".txt"


def open_text(path: str, key: str, parse: Parse[Parsed]) -> LineSource[Parsed]:
    """Open a plain text file, each line as a record with one key.

    Raises:
        DataError: It cannot be read.
    """
    return LineSource(path, count_lines(Path(path)), read_text(Path(path), key, parse))


def _example_columns(path: str, names: Sequence[str], image_key: str | None) -> list[str]:
    columns = [name for name in EXAMPLE_COLUMNS if name in names]
    if not columns:
        raise DataError(f"{path}: has neither messages nor prompt and completion; its columns: {names_in(names)}")
    more = [*TEMPLATE_COLUMNS, *image_columns(names, image_key), *([SYSTEM] if CONVERSATIONS in names else [])]
    return [*columns, *(name for name in more if name in names)]


@contextmanager
def load_limit(limit_s: float, name: str) -> Iterator[None]:
    """Bound the time of reading a data set inside the context, on the main thread.

    Raises:
        DataError: It took longer.
    """
    try:
        with interrupted_after(limit_s):
            yield
    except TimeIsUp:
        raise DataError(f"{name}: reading it took longer than data.load_timeout_s = {limit_s:g} s") from None
