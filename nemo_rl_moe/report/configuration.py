# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What runs were configured to do, side by side."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_rl_moe.run_folder.run_data import RunData

LONGEST_VALUE = 2000


def configuration_rows(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    """A row a setting: `key`, the `values` of all runs as text (null: the run has no such setting), and whether they
    `differ`. First the settings of the configuration, then those that were in force in the routers.
    """
    columns = [
        flattened(run.config) | {f"in force: {key}": value for key, value in flattened(run.moe_configuration).items()}
        for run in runs
    ]
    keys = dict.fromkeys(key for column in columns for key in column)
    rows = []
    for key in sorted(keys, key=lambda key: key.startswith("in force: ")):
        values = [column.get(key) for column in columns]
        rows.append({"key": key, "values": values, "differ": len(set(values)) > 1})
    return rows


def flattened(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Keys joined by dots, and values as JSON has them; an empty section is a value."""
    found: dict[str, str] = {}
    for name, value in settings.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            found |= flattened(value, f"{key}.")
        else:
            text = (
                value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False, skipkeys=True)
            )
            found[key] = text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]} [...]"
    return found
