# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Records in files of text: JSON lines, JSON, CSV and plain lines, without guesses about types.

Table libraries guess the types of columns. They turn a cell "007" into 7, 1 in a column with 0.5 into 1.0, and some
texts into dates.
"""

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeVar

from nemo_rl_moe.config.suggestions import shortened
from nemo_rl_moe.data.record_values import RecordError, unique_keys
from nemo_rl_moe.data.records import BadLine
from nemo_rl_moe.errors import DataError, counted, json_problem

Parsed = TypeVar("Parsed")
Parse = Callable[[object, str], Parsed]
"""A function that parses a decoded record, given its `file:line`. Raises `RecordError`."""
ChooseColumns = Callable[[str, Sequence[str]], Sequence[str]]
"""A function that returns the columns to read, given the path and the columns of a table. Raises `DataError`."""

JSONL = ".jsonl"
TextKind = Literal["json", "csv"]
KIND_OF_SUFFIX: Mapping[str, TextKind] = {JSONL: "json", ".json": "json", ".csv": "csv"}

_BLOCK_BYTES = 1 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LONGEST_CELL = 2**31 - 1
_SPACE = " \t\r\n"


def count_lines(path: Path) -> int:
    """Return the number of lines of a file. The last line may lack its newline."""
    count, last = 0, b"\n"
    with _read_errors(path), path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            count, last = count + block.count(b"\n"), block[-1:]
    return count + (last != b"\n")


@contextmanager
def _read_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None


def read_jsonl(path: Path, parse: Parse[Parsed]) -> Iterator[Parsed | BadLine]:
    """Yield the parsed record of each line, or a `BadLine`."""
    return _read_lines(path, _decode, parse)


def read_text(path: Path, key: str, parse: Parse[Parsed]) -> Iterator[Parsed | BadLine]:
    """Yield the parsed record of each line of a plain text file, or a `BadLine`. Each line is a record with the key
    `key`."""
    return _read_lines(path, lambda text: {key: text}, parse)


def _read_lines(path: Path, decode: Callable[[str], object], parse: Parse[Parsed]) -> Iterator[Parsed | BadLine]:
    # Read as bytes, so that only a newline ends a line. JSON allows Unicode's other line separators inside strings.
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            yield _parsed(lambda: decode(_text(line, is_first=number == 1)), parse, f"{path}:{number}")  # noqa: B023


def open_text_file(
    path: Path, kind: TextKind, parse: Parse[Parsed], choose_columns: ChooseColumns
) -> tuple[int, Iterator[Parsed | BadLine]]:
    """Return the number of records in a file (lines, members of a list or rows), and an iterator over them. JSON may be
    lines or a list."""
    if kind == "json" and not _is_list(path):
        return count_lines(path), read_jsonl(path, parse)
    found = _read_list(path, parse) if kind == "json" else _read_csv(path, parse, choose_columns)
    return len(found), iter(found)


def _is_list(path: Path) -> bool:
    """Return whether a file is one JSON list. A `.jsonl` file never is, since its first line may be a list."""
    with _read_errors(path), path.open("rb") as file:
        first = file.read(_BLOCK_BYTES)
    return path.suffix != JSONL and first.removeprefix(_BYTE_ORDER_MARK).lstrip().startswith(b"[")


def _read_list(path: Path, parse: Parse[Parsed]) -> list[Parsed | BadLine]:
    members = enumerate(_members(_whole_text(path), path), start=1)
    return [_parsed(lambda: _checked(record), parse, f"{path}:{number}") for number, record in members]  # noqa: B023


def _read_csv(path: Path, parse: Parse[Parsed], choose_columns: ChooseColumns) -> list[Parsed | BadLine]:
    """Read a table with a header. Each row becomes a record of unchanged texts. The record's sample id has the number
    of the row's first line."""
    csv.field_size_limit(_LONGEST_CELL)
    rows = csv.reader(io.StringIO(_whole_text(path), newline=""), strict=True)
    header = _header(rows, path)
    wanted = set(choose_columns(str(path), header))
    found: list[Parsed | BadLine] = []
    while True:
        place = f"{path}:{rows.line_num + 1}"
        try:
            row = next(rows)
        except StopIteration:
            return found
        except csv.Error as error:
            found.append(BadLine(place, f"not valid CSV: {error}"))
            continue
        found.append(_parsed(lambda: _record_of(header, row, wanted), parse, place))  # noqa: B023


def _parsed(decode: Callable[[], object], parse: Parse[Parsed], place: str) -> Parsed | BadLine:
    try:
        return parse(decode(), place)
    except RecordError as error:
        return BadLine(place, str(error))
    except RecursionError:
        return BadLine(place, "the record is nested too deeply")


def _header(rows: Iterator[list[str]], path: Path) -> list[str]:
    try:
        header = next(rows, [])
    except csv.Error as error:
        raise DataError(f"{path}: its first line is not valid CSV: {error}") from None
    if not header:
        raise DataError(f"{path}: has no first line with the names of its columns")
    if twice := [name for name in header if header.count(name) > 1]:
        raise DataError(f"{path}: two columns are named {shortened(twice[0])!r}, expected different names")
    return header


def _record_of(header: Sequence[str], row: Sequence[str], wanted: set[str]) -> dict[str, str]:
    if not row:
        raise RecordError("the line is empty")
    if len(row) != len(header):
        raise RecordError(f"the row has {counted(len(row), 'cell')}, expected {len(header)}, one for each column")
    return {name: cell for name, cell in zip(header, row, strict=True) if name in wanted}


def _members(text: str, path: Path) -> Iterator[object]:
    """Yield each member of a JSON list. For a member with a repeated key, yield the `RecordError`."""
    careful, plain = json.JSONDecoder(object_pairs_hook=unique_keys), json.JSONDecoder()
    position = _after_space(text, text.index("[") + 1)
    is_first = True
    try:
        while text[position : position + 1] != "]":
            if not is_first:
                if text[position : position + 1] != ",":
                    raise json.JSONDecodeError("Expecting ',' delimiter", text, position)
                position = _after_space(text, position + 1)
            is_first = False
            member, end = plain.raw_decode(text, position)
            try:
                member = careful.raw_decode(text, position)[0]
            except RecordError as error:
                member = error
            yield member
            position = _after_space(text, end)
        if (rest := _after_space(text, position + 1)) < len(text):
            raise json.JSONDecodeError("Extra data", text, rest)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}:{error.lineno}: not valid JSON: {json_problem(error)} at column {error.colno}"
        ) from None
    except RecursionError:
        raise DataError(f"{path}: not valid JSON: nested too deeply") from None
    except ValueError as error:  # a number with thousands of digits
        raise DataError(f"{path}: not valid JSON: {error}") from None


def _after_space(text: str, position: int) -> int:
    while position < len(text) and text[position] in _SPACE:
        position += 1
    return position


def _checked(record: object) -> object:
    if isinstance(record, RecordError):
        raise record
    return record


def _whole_text(path: Path) -> str:
    try:
        with _read_errors(path):
            return path.read_bytes().removeprefix(_BYTE_ORDER_MARK).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not valid UTF-8: {bad_byte(error)}") from None


def _text(line: bytes, *, is_first: bool) -> str:
    """Return the text of a line without its newline. With the newline, errors about JSON that ends too early would name
    the start of the next line."""
    if is_first:
        line = line.removeprefix(_BYTE_ORDER_MARK)
    if not line.strip():
        raise RecordError("the line is empty")
    try:
        return line.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise RecordError(f"not valid UTF-8: {bad_byte(error)}") from None


def bad_byte(error: UnicodeDecodeError) -> str:
    """Return a description of the first byte that is not UTF-8, with its position counted from 1."""
    return f"byte 0x{error.object[error.start]:02x} at byte {error.start + 1}"


def _decode(text: str) -> object:
    try:
        return json.loads(text, object_pairs_hook=unique_keys)
    except RecordError:
        raise
    except json.JSONDecodeError as error:
        raise RecordError(f"not valid JSON: {json_problem(error)} at column {error.colno}") from None
    except RecursionError:
        raise RecordError("not valid JSON: nested too deeply") from None
    except ValueError as error:  # a number with thousands of digits
        raise RecordError(f"not valid JSON: {error}") from None
