# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Lines, their numbers, and what can be wrong with them before they are records."""

from pathlib import Path

import pytest

from nemo_rl_moe.data.records import BadLine, Example, parse_record
from nemo_rl_moe.data.text_files import count_lines, read_jsonl
from tests.unit.data.conftest import refused

GOOD = b'{"prompt": "a", "completion": "b"}'


def read(tmp_path: Path, content: bytes) -> list[Example | BadLine]:
    path = tmp_path / "d.jsonl"
    path.write_bytes(content)
    lines = list(read_jsonl(path, parse_record))
    assert count_lines(path) == len(lines)
    return lines


def reasons(tmp_path: Path, content: bytes) -> list[str | None]:
    return [line.reason if isinstance(line, BadLine) else None for line in read(tmp_path, content)]


def test_line_numbers_start_at_one_and_name_the_file(tmp_path):
    lines = read(tmp_path, GOOD + b"\n{}\n" + GOOD)
    assert [line.sample_id for line in lines] == [f"{tmp_path}/d.jsonl:{number}" for number in (1, 2, 3)]
    assert str(lines[1]).startswith(f"{tmp_path}/d.jsonl:2: the line has neither")


@pytest.mark.parametrize(
    ("line", "reason"),
    {
        b"": "the line is empty",
        b"  \t": "the line is empty",
        b'{"prompt": "a"': "not valid JSON: Expecting ',' delimiter at column 15",
        b"{'prompt': 'a'}": "not valid JSON: Expecting property name enclosed in double quotes at column 2",
        GOOD + GOOD: "not valid JSON: Extra data at column 35",
        b'{"prompt": "\xff", "completion": "b"}': "not valid UTF-8: byte 0xff at byte 13",
        b"[" * 200_000: "not valid JSON: nested too deeply",
        b'{"prompt": "a", "completion": "b", "prompt": "c"}': "the key 'prompt' occurs twice in an object, expected"
        " once",
        b'{"messages": [{"role": "user", "content": "a", "role": "assistant"}]}': "the key 'role' occurs twice in an"
        " object, expected once",
        b"null": "the line is null, expected an object with messages, or prompt and completion",
    }.items(),
)
def test_bad_line_between_good_ones(tmp_path, line, reason):
    assert reasons(tmp_path, GOOD + b"\n" + line + b"\n" + GOOD + b"\n") == [None, reason, None]


def test_a_number_of_thousands_of_digits(tmp_path):
    (reason,) = reasons(tmp_path, b'{"prompt": ' + b"1" * 5000 + b"}")
    assert reason is not None
    assert reason.startswith("not valid JSON: Exceeds the limit")


def test_byte_order_mark_windows_line_ends_and_unicode_separators(tmp_path):
    content = b"\xef\xbb\xbf" + GOOD + b'\r\n{"prompt": "a\xe2\x80\xa8b\xc2\x85c", "completion": "d"}\r\n'
    first, second = read(tmp_path, content)
    assert isinstance(first, Example)
    assert isinstance(second, Example)
    assert second.plain == ("a\u2028b\x85c", "d")


def test_empty_file(tmp_path):
    assert read(tmp_path, b"") == []


def test_missing_file(tmp_path):
    assert refused(count_lines, tmp_path / "no.jsonl") == [
        f"{tmp_path}/no.jsonl: cannot be read: No such file or directory"
    ]
