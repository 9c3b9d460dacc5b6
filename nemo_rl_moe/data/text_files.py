# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Files of text that hold records: JSON lines, JSON, CSV and plain lines, read without a guess about any value.

Libraries of tables give columns types: they make 7 of a cell "007", 1.0 of a 1 beside a 0.5, and a date of a text.
"""

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeVar

from nemo_rl_moe.config.suggestions import shortened
from nemo_rl_moe.data.record_values import RecordError, unique_keys
from nemo_rl_moe.data.records import BadLine
from nemo_rl_moe.errors import DataError, counted, json_problem

Parsed = TypeVar("Parsed")
Parse = Callable[[object, str], Parsed]
"""Function of a decoded record and its `file:line`, which raises `RecordError`."""
ChooseColumns = Callable[[str, Sequence[str]], Sequence[str]]
"""Function of the path and the columns of a table; returns those to read, or raises `DataError`."""

JSONL = ".jsonl"
TextKind = Literal["json", "csv"]
KIND_OF_SUFFIX: Mapping[str, TextKind] = {JSONL: "json", ".json": "json", ".csv": "csv"}

_BLOCK_BYTES = 1 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LONGEST_CELL = 2**31 - 1
_SPACE = " \t\r\n"


def count_lines(path: Path) -> int:
    """Count the lines of a file, the last one with or without its newline."""
    count, last = 0, b"\n"
    try:
        with path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                count, last = count + block.count(b"\n"), block[-1:]
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    return count + (last != b"\n")


def read_jsonl(path: Path, parse: Parse[Parsed]) -> Iterator[Parsed | BadLine]:
    """Yield the record of each line, or a `BadLine`.

    Lines end at the newline byte only: JSON allows Unicode's other separators inside a string.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            yield _parsed(lambda: _decode(line, is_first=number == 1), parse, f"{path}:{number}")  # noqa: B023


def read_text(path: Path, key: str, parse: Parse[Parsed]) -> Iterator[Parsed | BadLine]:
    """Read a plain text file, each line as a record with one key."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            yield _parsed(lambda: {key: _text(line, is_first=number == 1)}, parse, f"{path}:{number}")  # noqa: B023


def open_text_file(
    path: Path, kind: TextKind, parse: Parse[Parsed], choose_columns: ChooseColumns
) -> tuple[int, Iterator[Parsed | BadLine]]:
    """Return the number of lines, records or rows of a file, and its records.

    Args:
        kind: `json` is a list of records, or JSON lines.
        choose_columns: For a table.
    """
    if kind == "json" and not _is_list(path):
        return count_lines(path), read_jsonl(path, parse)
    found = _read_list(path, parse) if kind == "json" else _read_csv(path, parse, choose_columns)
    return len(found), iter(found)


def _is_list(path: Path) -> bool:
    """Return whether a file begins as a list; a `.jsonl` file, in which a line may be one, is none."""
    try:
        with path.open("rb") as file:
            first = file.read(_BLOCK_BYTES)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    return path.suffix != JSONL and first.removeprefix(_BYTE_ORDER_MARK).lstrip().startswith(b"[")


def _read_list(path: Path, parse: Parse[Parsed]) -> list[Parsed | BadLine]:
    """Read a list of records, each named by its number in the list from 1 on."""
    members = enumerate(_members(_whole_text(path), path), start=1)
    return [_parsed(lambda: _checked(record), parse, f"{path}:{number}") for number, record in members]  # noqa: B023


def _read_csv(path: Path, parse: Parse[Parsed], choose_columns: ChooseColumns) -> list[Parsed | BadLine]:
    """Read a table with a header, each row as a record of texts as they stand in the file, named by its first line."""
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
    """Yield each member of a list; in the place of one with a key that stands twice, its `RecordError`."""
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
        return path.read_bytes().removeprefix(_BYTE_ORDER_MARK).decode("utf-8")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not valid UTF-8: {bad_byte(error)}") from None


def _text(line: bytes, *, is_first: bool) -> str:
    """Return the text of a line, without its end."""
    if is_first:
        line = line.removeprefix(_BYTE_ORDER_MARK)
    if not line.strip():
        raise RecordError("the line is empty")
    try:
        return line.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise RecordError(f"not valid UTF-8: {bad_byte(error)}") from None


def bad_byte(error: UnicodeDecodeError) -> str:
    """Return the first byte that is no UTF-8, with its place counted from 1."""
    return f"byte 0x{error.object[error.start]:02x} at byte {error.start + 1}"


def _decode(line: bytes, *, is_first: bool) -> object:
    text = _text(line, is_first=is_first)  # with its end, a line that is cut short would end in column 1 of the next
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
