# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Device code in a shared library, by architecture: what other cards need is overwritten with zeros, which compress.

CUDA's compiler puts device code into ELF sections: containers, each with an entry for each architecture. Entries stay
where they are, so that no address changes, and the driver never reads those of other cards.
"""

import struct
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass

_DEVICE_CODE = (".nv_fatbin", "__nv_relfatbin")
_MAGIC = 0xBA55ED50
_CONTAINER = struct.Struct("<IHHQ")  # magic, version, bytes of this header, bytes behind it
_ENTRY = struct.Struct("<HHIQ")  # kind, version, bytes of this header, bytes of the code behind it
_ARCHITECTURE_AT = 28
_ALIGNMENT = 8

_ELF64 = b"\x7fELF\x02"
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SECTIONS_AT, _SECTION_COUNTS_AT = 0x28, 0x3A


class NotALibrary(ValueError):
    """Bytes that are no shared library with device code."""


@dataclass(frozen=True)
class Entry:
    """Code for one architecture.

    Attributes:
        architecture: 90 for sm_90 and sm_90a.
        begin: First byte of the code.
        size: In bytes.
    """

    architecture: int
    begin: int
    size: int


def sections(library: bytes | bytearray) -> dict[str, tuple[int, int]]:
    """Return the begin and the size of each section of an ELF file."""
    if not library.startswith(_ELF64):
        raise NotALibrary("no ELF file of 64 bits")
    (table,) = struct.unpack_from("<Q", library, _SECTIONS_AT)
    size, count, names_index = struct.unpack_from("<HHH", library, _SECTION_COUNTS_AT)
    rows = [_SECTION.unpack_from(library, table + index * size) for index in range(count)]
    names = rows[names_index][4]
    found = {}
    for name_at, _, _, _, begin, num_bytes, *_ in rows:
        name = bytes(library[names + name_at : library.index(b"\0", names + name_at)]).decode()
        found[name] = (begin, num_bytes)
    return found


def entries(library: bytes | bytearray, begin: int, size: int) -> Iterator[Entry]:
    """Yield the entries of all containers of a section."""
    at, end = begin, begin + size
    while at + _CONTAINER.size <= end:
        magic, _, header, behind = _CONTAINER.unpack_from(library, at)
        if magic != _MAGIC:
            at += _ALIGNMENT  # containers are padded
            continue
        at += header
        last = at + behind
        while at < last:
            _, _, header, num_bytes = _ENTRY.unpack_from(library, at)
            (architecture,) = struct.unpack_from("<I", library, at + _ARCHITECTURE_AT)
            yield Entry(architecture, at + header, num_bytes)
            at += header + num_bytes


def keep_architectures(library: bytearray, kept: Collection[int]) -> Counter[int]:
    """Overwrite the device code of all other architectures, and debug information.

    Returns:
        Bytes of device code that the library had, by architecture.

    Raises:
        NotALibrary: It has no device code, or none for one of the kept architectures.
    """
    found: Counter[int] = Counter()
    table = sections(library)
    for name, (begin, size) in table.items():
        if name.startswith(".debug_"):
            library[begin : begin + size] = bytes(size)
        if name in _DEVICE_CODE:
            for entry in list(entries(library, begin, size)):
                found[entry.architecture] += entry.size
                if entry.architecture not in kept:
                    library[entry.begin : entry.begin + entry.size] = bytes(entry.size)
    if missing := sorted(set(kept) - found.keys()):
        has = ", ".join(map(str, sorted(found))) or "none"
        raise NotALibrary(f"has no device code for {', '.join(map(str, missing))}; it has: {has}")
    return found
