# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads a page's arrays as its script does, written a second time from the description of the format."""

import base64
import gzip
from typing import Any

import numpy as np
from numpy.typing import NDArray


def unpacked(reference: dict[str, Any], blobs: dict[str, str]) -> NDArray[Any]:
    """The array that a reference stands for."""
    content = gzip.decompress(base64.b64decode(blobs[reference["blob"]]))
    dtype = np.dtype(f"<{reference['dtype']}")
    length = int(np.prod(reference["shape"]))
    return np.frombuffer(content, dtype, length, reference["offset"]).reshape(reference["shape"])
