# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A bucket of a weight transfer: a labelled safetensors file with a checksum of each tensor.

A receiver checks label and checksums before its loader gets a tensor. Corrupted bytes, and a bucket of another
transfer, number or version, raise an error.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from nemo_rl_moe.checksums import checksum_of
from nemo_rl_moe.errors import WeightSyncError

_LABEL, _CHECKSUMS = "label", "checksums"
_MOST_NAMED = 3
_WORDS_AT_A_TIME = 2**22


@dataclass(frozen=True)
class BucketLabel:
    transfer: str
    version: int
    sender: int
    number: int

    def __str__(self) -> str:
        return f"bucket {self.number} of sender {self.sender}, version {self.version}, transfer {self.transfer}"


def write_bucket(path: Path, label: BucketLabel, tensors: Mapping[str, Tensor]) -> None:
    checksums = {name: tensor_checksum(name, tensor) for name, tensor in tensors.items()}
    save_file(dict(tensors), path, {_LABEL: json.dumps(asdict(label)), _CHECKSUMS: json.dumps(checksums)})


@contextmanager
def opened_bucket(path: Path, label: BucketLabel) -> Iterator[dict[str, Tensor]]:
    """Verify a bucket, and yield its tensors. They are valid inside the context."""
    try:
        file = safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise WeightSyncError(f"{path.name} cannot be read: {error}") from error
    with file:
        try:
            # This reads only the header. The numbers are mapped, and read by the comparison.
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
            found, expected = _read_metadata(file.metadata())
        except (OSError, SafetensorError, ValueError, TypeError, KeyError) as error:
            raise WeightSyncError(f"{path.name} cannot be read: {error}") from error
        if found != label:
            raise WeightSyncError(f"{path.name} is {found}; expected {label}")
        compare(path.name, label, tensors, expected)
        yield tensors


def compare(bucket_name: str, label: BucketLabel, tensors: Mapping[str, Tensor], expected: Mapping[str, Any]) -> None:
    damaged = [name for name, tensor in tensors.items() if tensor_checksum(name, tensor) != expected.get(name)]
    damaged += [name for name in expected if name not in tensors]
    if damaged:
        more = f" and {len(damaged) - _MOST_NAMED} more" if len(damaged) > _MOST_NAMED else ""
        names = ", ".join(damaged[:_MOST_NAMED])
        raise WeightSyncError(f"{bucket_name} is damaged in {names}{more}: not what sender {label.sender} has sent")


def tensor_checksum(name: str, tensor: Tensor) -> str:
    """Return the checksum of a tensor's name, dtype, shape and bytes."""
    header = f"{name} {tensor.dtype} {tuple(tensor.shape)} "
    return checksum_of(header.encode(), tensor.flatten().view(torch.uint8).numpy())


def weighted_sum(content: Tensor) -> int:
    """Return a checksum that GPUs can compute: the sum of 32-bit words, word `i` times `2 i + 1`, modulo 2^64.

    A change of one word, or a swap of two different words, always changes the sum.
    """
    whole = content.numel() // 4 * 4
    words, rest = content[:whole].view(torch.int32), content[whole:].long()
    total = torch.zeros((), dtype=torch.int64, device=content.device)
    for begin in range(0, len(words), _WORDS_AT_A_TIME):
        part = words[begin : begin + _WORDS_AT_A_TIME].long()
        total += (part * _weights(begin, part)).sum()
    total += (rest * _weights(len(words), rest)).sum()
    return int(total)


def _weights(begin: int, words: Tensor) -> Tensor:
    return 2 * torch.arange(begin, begin + len(words), device=words.device) + 1


def _read_metadata(metadata: Mapping[str, str] | None) -> tuple[BucketLabel, dict[str, Any]]:
    if metadata is None:
        raise ValueError("it has no label")
    return BucketLabel(**json.loads(metadata[_LABEL])), dict(json.loads(metadata[_CHECKSUMS]))
