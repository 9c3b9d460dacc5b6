# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""miles' rollout dumps in Parquet (`--save-debug-rollout-data dump/{rollout_id}.parquet`), converted to the content of
`.pt` dumps.

Layout of the main branch of October 2026, `miles/utils/rollout_dump.py`: a field whose values have one type is a plain
column. Any other field has the `torch.save` bytes of each value, and the schema's metadata `miles.encoded` names its
column. Files before version 1 have only plain columns.
"""

import json
from pathlib import Path
from typing import Any

from nemo_rl_moe.routing.audit.adapters.inert_pickle import read_pickle

MAGIC = b"PAR1"
_VERSION, _ROLLOUT = b"miles.rollout_dump.version", b"rollout_id"


def load_parquet(path: Path) -> Any:
    """Return the content in the form of a `.pt` dump, or an empty dictionary for other Parquet files.

    Raises:
        ValueError: The dump has a later version.
    """
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    metadata = table.schema.metadata or {}
    if _ROLLOUT not in metadata:
        return {}
    if metadata.get(_VERSION, b"1") != b"1":
        raise ValueError(f"version {metadata[_VERSION].decode(errors='replace')} of miles' dumps, expected 1")
    rows = table.to_pylist()
    for name in json.loads(metadata.get(b"miles.encoded", b"[]")):
        for number, row in enumerate(rows):
            row[name] = read_pickle(row[name], f"{path}: sample {number}: {name}")
    for name, absent in json.loads(metadata.get(b"miles.missing", b"{}")).items():
        for number in absent:
            rows[number].pop(name)
    return {"rollout_id": int(metadata[_ROLLOUT]), "samples": rows}
