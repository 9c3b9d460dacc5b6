# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Checksums of a folder: what is damaged is named, whoever compares which share of it."""

import json
from pathlib import Path

import pytest
from xxhash import xxh3_128_hexdigest

from nemo_rl_moe import checksums, cli
from nemo_rl_moe.checksums import (
    INVENTORY_FILE_NAME,
    ChecksumStream,
    InventoryError,
    accept_files,
    add_to_inventory,
    check_sizes,
    find_damage,
    read_inventory,
    write_inventory,
)

TENSORS = {"header": b"names", "first": bytes(range(256)) * 40, "empty": b"", "second": b"\x01" * 3000, "third": b"3"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A file in parts, two small files, and a folder below with an inventory of its own."""
    stream = ChecksumStream((tmp_path / "data.bin").open("wb"))
    for name, content in TENSORS.items():
        half = len(content) // 2
        assert stream.write(content[:half]) + stream.write(memoryview(content)[half:]) == len(content)
        stream.end_part(name)
    stream.to_disk()
    stream.close()
    (tmp_path / "state.json").write_text('{"step": 3}')
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner/other.bin").write_bytes(b"inner")
    write_inventory(tmp_path / "inner")
    write_inventory(tmp_path, {"data.bin": stream.parts})
    return tmp_path


def place_of(tensor: str) -> int:
    """Return where a tensor begins in `data.bin`."""
    names = list(TENSORS)
    return sum(len(TENSORS[name]) for name in names[: names.index(tensor)])


def change(path: Path, at: int, content: bytes) -> None:
    """Writes over some bytes; the size stays."""
    before = path.read_bytes()
    path.write_bytes(before[:at] + content + before[at + len(content) :])
    assert path.stat().st_size == len(before)


def test_a_whole_folder(folder: Path) -> None:
    check_sizes(folder)
    assert find_damage(folder) == find_damage(folder / "inner") == []
    entries = read_inventory(folder)
    assert [part.name for part in entries["data.bin"].parts] == list(TENSORS)
    for part in entries["data.bin"].parts:
        assert part.checksum == xxh3_128_hexdigest(TENSORS[part.name])
    assert entries["state.json"].checksum == xxh3_128_hexdigest(b'{"step": 3}')
    assert entries["inner/other.bin"].checksum is None, "its own folder's inventory has it"
    assert entries[f"inner/{INVENTORY_FILE_NAME}"].checksum is not None


@pytest.mark.parametrize("tensor", ["header", "first", "second", "third"])
@pytest.mark.parametrize("num_shares", [1, 2, 3, 8])
def test_a_damaged_tensor_is_named_by_the_one_share_that_it_falls_to(
    folder: Path, tensor: str, num_shares: int
) -> None:
    change(folder / "data.bin", place_of(tensor), bytes([TENSORS[tensor][0] ^ 4]))
    check_sizes(folder)
    found = [find_damage(folder, share=share, num_shares=num_shares) for share in range(num_shares)]
    (line,) = [line for lines in found for line in lines]
    assert line.startswith(f"{folder / 'data.bin'}: damaged in {tensor}: ")


def test_every_byte_falls_to_one_share(folder: Path) -> None:
    """All of it is damaged: each tensor is named once, whatever the number of shares."""
    change(folder / "data.bin", 0, b"\xff" * (folder / "data.bin").stat().st_size)
    change(folder / "config.json", 0, b"[]")
    for num_shares in (1, 2, 5, 16):
        lines = [
            line for share in range(num_shares) for line in find_damage(folder, share=share, num_shares=num_shares)
        ]
        text = "\n".join(lines)
        # Up to three are named on a line, and the others are counted.
        num_named = sum(text.count(name) for name in ("header", "first", "second", "third"))
        assert num_named + text.count("and 1 more") == 4
        assert text.count("config.json: damaged") == 1


@pytest.mark.parametrize("num_shares", [1, 2, 3, 8])
def test_each_part_falls_to_one_share(folder: Path, num_shares: int) -> None:
    first = place_of("first")
    change(folder / "data.bin", first, b"\xff" * ((folder / "data.bin").stat().st_size - first))
    lines = [line for share in range(num_shares) for line in find_damage(folder, share=share, num_shares=num_shares)]
    found = {name: sum(line.count(name) for line in lines) for name in TENSORS}
    assert found == {name: int(name != "header" and bool(content)) for name, content in TENSORS.items()}


@pytest.mark.parametrize("run_bytes", [1, 4000])
def test_a_large_file_is_compared_in_runs_and_reported_in_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, run_bytes: int
) -> None:
    """Each by a thread, in reads that are shorter than a tensor."""
    monkeypatch.setattr(checksums, "_RUN_BYTES", run_bytes)
    monkeypatch.setattr(checksums, "_BUFFER_BYTES", 256)
    assert find_damage(folder) == []
    change(folder / "data.bin", place_of("first"), b"\xff" * 13241)
    change(folder / "state.json", 9, b"4")
    of_data, of_state = find_damage(folder)
    assert of_data.startswith(f"{folder / 'data.bin'}: damaged in first, second, third: not the bytes")
    assert of_state.startswith(f"{folder / 'state.json'}: damaged: not the bytes")


def test_small_files_are_compared_at_once(folder: Path) -> None:
    change(folder / "state.json", 9, b"4")
    with pytest.raises(InventoryError, match=r"state\.json: damaged: not the bytes that were written"):
        check_sizes(folder)


def test_the_inner_inventory_belongs_to_the_outer_folder(folder: Path) -> None:
    """A folder taken from an older checkpoint is whole in itself."""
    (folder / "inner/other.bin").write_bytes(b"older")
    write_inventory(folder / "inner")
    assert find_damage(folder / "inner") == []
    (line,) = find_damage(folder)
    assert line.startswith(f"{folder / 'inner' / INVENTORY_FILE_NAME}: damaged")


def test_missing_and_cut_files(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "data.bin").write_bytes((folder / "data.bin").read_bytes()[:-1])
    lines = find_damage(folder)
    assert [line.rpartition(":")[2] for line in lines] == [" is missing", " 13245 bytes, expected 13246"]
    with pytest.raises(InventoryError, match="is missing"):
        check_sizes(folder)


def test_a_file_that_came_later_is_added(folder: Path) -> None:
    (folder / "later.json").write_text("1")
    add_to_inventory(folder, "later.json")
    check_sizes(folder)
    change(folder / "later.json", 0, b"2")
    assert len(find_damage(folder)) == 1


def test_an_earlier_releases_sizes_are_still_understood(folder: Path) -> None:
    sizes = {name: entry.num_bytes for name, entry in read_inventory(folder).items()}
    (folder / INVENTORY_FILE_NAME).write_text(json.dumps(sizes))
    check_sizes(folder)
    assert find_damage(folder) == []
    (folder / "data.bin").write_bytes(b"")
    with pytest.raises(InventoryError, match="got 0 bytes"):
        check_sizes(folder)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"algorithm": "xxh3_128"', '"algorithm": "md5"'),
        ('"num_bytes": 13246', '"num_bytes": 13247'),
        ('["third", 1,', '["third", 2,'),
        ('["third", 1,', '["third", -1,'),
        ("{", ""),
        ('"files"', '"fiels"'),
    ],
)
def test_a_damaged_inventory_is_reported(folder: Path, old: str, new: str) -> None:
    path = folder / INVENTORY_FILE_NAME
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(InventoryError, match=r"files\.json: damaged"):
        read_inventory(folder)
    assert len(find_damage(folder)) == 1


def test_files_that_were_edited_on_purpose_keep_their_parts(folder: Path) -> None:
    """Otherwise each start would compare all of a model's weights in one thread, before the ranks do."""
    change(folder / "data.bin", place_of("second"), b"edited")
    (folder / "config.json").write_text('{"of": "another size"}')
    accept_files(folder)
    assert find_damage(folder) == []
    assert [part.name for part in read_inventory(folder)["data.bin"].parts] == list(TENSORS)
    change(folder / "data.bin", place_of("second"), b"damage")
    (line,) = find_damage(folder)
    assert line.startswith(f"{folder / 'data.bin'}: damaged in second: ")


def test_a_file_of_another_size_has_one_checksum_from_then_on(folder: Path) -> None:
    (folder / "data.bin").write_bytes(b"shorter")
    accept_files(folder)
    entry = read_inventory(folder)["data.bin"]
    assert (entry.num_bytes, entry.checksum, entry.parts) == (7, xxh3_128_hexdigest(b"shorter"), [])


def test_a_damaged_inventory_is_reported_and_written_anew(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / INVENTORY_FILE_NAME).write_text("{")
    assert cli.main(["verify", str(folder)]) == 1
    assert capsys.readouterr().err.startswith(f"error: {folder / INVENTORY_FILE_NAME}: damaged: ")
    assert cli.main(["verify", "--accept", str(folder)]) == 0
    assert cli.main(["verify", str(folder)]) == 0


def test_a_folder_without_an_inventory_has_nothing_to_compare(tmp_path: Path) -> None:
    assert find_damage(tmp_path) == []
    with pytest.raises(InventoryError, match=r"files\.json: cannot be read"):
        check_sizes(tmp_path)
