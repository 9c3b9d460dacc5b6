# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Stretches of files that are read in any order: the right bytes, and the checksum of all of them."""

import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_moe import checked_reading
from nemo_rl_moe.checked_reading import HashingReader, PartsRead
from nemo_rl_moe.checksums import ChecksumStream, checksum_of, write_inventory

CONTENT = bytes(range(256)) * 300
START, NUM_BYTES = 1000, 70_000


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("file") / "content"
    path.write_bytes(CONTENT)
    return path


@given(readings=st.lists(st.tuples(st.integers(0, NUM_BYTES + 10), st.integers(0, NUM_BYTES + 10)), max_size=6))
def test_any_order_gives_the_bytes_and_the_checksum(path: Path, readings: list[tuple[int, int]]) -> None:
    expected = CONTENT[START : START + NUM_BYTES]
    with path.open("rb") as file:
        reader = HashingReader(file, START, NUM_BYTES)
    with reader:  # its file may be closed before
        for position, length in readings:
            reader.seek(position)
            assert reader.read(length) == expected[position : position + length]
            assert reader.tell() == max(position, min(position + length, NUM_BYTES))
        reader.seek(-4, io.SEEK_END)
        assert reader.read() == expected[-4:]
        assert reader.checksum() == checksum_of(expected)


def test_bytes_that_are_read_in_their_order_are_read_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, original = [], checked_reading.os.preadv

    def counting(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        count = original(descriptor, buffers, offset)
        read.append((offset - START, count))
        return count

    monkeypatch.setattr(checked_reading.os, "preadv", counting)
    with path.open("rb") as file, HashingReader(file, START, NUM_BYTES) as reader:
        reader.seek(NUM_BYTES - 22)  # as the reader of an archive does, whose contents stand at its end
        reader.read(22)
        reader.seek(100)
        reader.readinto(bytearray(60_000))
        assert reader.checksum() == checksum_of(CONTENT[START : START + NUM_BYTES])
    assert read == [(NUM_BYTES - 22, 22), (0, 100), (100, 60_000), (60_100, NUM_BYTES - 60_100)]


def test_a_file_that_is_cut_has_another_checksum(path: Path) -> None:
    with path.open("rb") as file, HashingReader(file, START, len(CONTENT)) as reader:
        assert len(reader.readall()) == len(CONTENT) - START
        assert reader.checksum() == checksum_of(CONTENT[START:]) != checksum_of(CONTENT)


def test_damaged_parts_are_named_by_their_file(tmp_path: Path) -> None:
    with (tmp_path / "weights").open("wb") as file:
        stream = ChecksumStream(file)
        for name in ("a", "b"):
            stream.write(name.encode() * 50)
            stream.end_part(name)
    (tmp_path / "config.json").write_text("{}")
    write_inventory(tmp_path, {"weights": stream.parts})
    parts = PartsRead.of_folder(tmp_path)
    assert parts is not None
    assert ("weights", 0, 50) in parts
    assert ("weights", 50, 50) in parts
    assert ("weights", 0, 100) not in parts
    assert ("config.json", 0, 2) not in parts, "a file of one checksum has no parts"
    parts.compare(("weights", 0, 50), checksum_of(b"a" * 50))
    assert parts.problems() == []
    parts.compare(("weights", 50, 50), checksum_of(b"a" * 50))
    assert parts.problems() == [
        f"{tmp_path}/weights: damaged in b: not the bytes that were written, by the checksum in files.json"
    ]


def test_a_folder_without_checksums_has_no_parts(tmp_path: Path) -> None:
    assert PartsRead.of_folder(tmp_path) is None
    (tmp_path / "files.json").write_text("{")
    assert PartsRead.of_folder(tmp_path) is None, "the damaged list is reported by who reads it first"
