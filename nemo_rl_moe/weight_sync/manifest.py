# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The note on a bucket whose bytes are not in a file: its tensors, checksum, and a handle to the bytes."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from nemo_rl_moe.checksums import checksum_of
from nemo_rl_moe.errors import WeightSyncError
from nemo_rl_moe.weight_sync.bucket import BucketLabel, weighted_sum
from nemo_rl_moe.weight_sync.packing import Packing


@dataclass(frozen=True)
class Manifest:
    """Content of a bucket whose bytes are not in a file.

    Attributes:
        checksum: Checksum of all bytes, names, formats and shapes.
        handle: The transport's handle to the bytes.
    """

    packing: Packing
    checksum: str
    handle: Mapping[str, Any]

    def opened(self, bucket_name: str, label: BucketLabel, buffer: Tensor) -> dict[str, Tensor]:
        """Verify a buffer and return its tensors."""
        if buffer_checksum(self.packing, buffer) != self.checksum:
            raise WeightSyncError(f"{bucket_name} is damaged: not what sender {label.sender} has sent")
        return self.packing.cut(buffer)


def manifest_text(label: BucketLabel, packing: Packing, buffer: Tensor, handle: Mapping[str, Any] | None = None) -> str:
    content = {
        "label": asdict(label),
        "tensors": packing.rows,
        "checksum": buffer_checksum(packing, buffer),
        "handle": dict(handle or {}),
    }
    return json.dumps(content)


def read_manifest(name: str, text: str, label: BucketLabel) -> Manifest:
    """Return the parsed and checked note on a bucket."""
    try:
        content = json.loads(text)
        found = BucketLabel(**content["label"])
        manifest = Manifest(Packing(content["tensors"]), content["checksum"], content["handle"])
    except (ValueError, TypeError, KeyError) as error:
        raise WeightSyncError(f"{name} cannot be read: {error}") from error
    if found != label:
        raise WeightSyncError(f"{name} is {found}; expected {label}")
    return manifest


def buffer_checksum(packing: Packing, buffer: Tensor) -> str:
    """Return one checksum of a buffer and its packing. A GPU buffer is summed on the GPU, with one synchronization."""
    content = str(weighted_sum(buffer)).encode() if buffer.is_cuda else buffer.numpy()
    return checksum_of(json.dumps(packing.rows).encode(), content)
