# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Ray's object store as a store of rows: arrays that one actor puts and others fetch."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
from jaxtyping import Shaped
from ray.exceptions import RayError

from nemo_rl_moe.distributed.stored_rows import RowStore


def fetch_objects(sources: Sequence[Any]) -> list[Shaped[np.ndarray, "rows ..."] | None]:
    """Fetch arrays by handle, read-only; None for one that was lost with the process that stored it."""
    try:
        return list(ray.get(list(sources)))
    except RayError:
        return [_fetched(source) for source in sources]


def _fetched(source: Any) -> Shaped[np.ndarray, "rows ..."] | None:
    try:
        return ray.get(source)
    except RayError:
        return None


RAY_STORE = RowStore(fetch_objects, ray.put)
"""Ray's object store, which must have started when a row is put or fetched."""
