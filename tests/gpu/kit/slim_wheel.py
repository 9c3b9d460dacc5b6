# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A wheel written anew: its library cut down to some architectures, without another framework, packed tightly."""

import base64
import hashlib
import zipfile
from collections import Counter
from collections.abc import Collection
from pathlib import Path

from tests.gpu.kit.fatbin import keep_architectures

_LEFT_OUT = "transformer_engine/jax/"


def slim(wheel: Path, target: Path, architectures: Collection[int]) -> Counter[int]:
    """Write `target`, which pip installs as it would the original; LZMA packs it to a third of what wheels have.

    Returns:
        Bytes of device code that its library had, by architecture.

    Raises:
        NotALibrary: Its library has no device code for one of the architectures.
    """
    found: Counter[int] = Counter()
    record = []
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(target, "w", zipfile.ZIP_LZMA) as written:
        for name in source.namelist():
            if name.startswith(_LEFT_OUT) or name.endswith("/"):
                continue
            if name.endswith(".dist-info/RECORD"):
                record.append(f"{name},,")
                continue
            content = bytearray(source.read(name))
            if name.endswith(".so"):
                found += keep_architectures(content, architectures)
            written.writestr(name, bytes(content))
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            record.append(f"{name},sha256={digest},{len(content)}")
        (name,) = [line.removesuffix(",,") for line in record if line.endswith(",,")]
        written.writestr(name, "\n".join([*record, ""]))
    return found
