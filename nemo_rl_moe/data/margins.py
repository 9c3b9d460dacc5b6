# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Margins of preference pairs: the difference that a record sets for the scores of its two responses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_rl_moe.config.suggestions import shortened
from nemo_rl_moe.data.record_values import RecordError, columns_of, kind_of, value_at

MARGINS = "margins"
"""Name of the batch column with the margin of each sequence's pair."""
LARGEST = 1_000_000
"""Largest size of a margin. Scores in float32 cannot differ by more and still be told apart."""
_USUAL_KEY, _SETTING = "margin", "data.margin_key"


@dataclass(frozen=True)
class Margins:
    """How margins are read.

    Attributes:
        key: Key of a record that holds its margin. None: `margin`, which all records or no records have.
    """

    key: str | None

    def margin_of(self, record: Mapping[str, Any]) -> float | None:
        """Return a record's margin, or None if no key is set and it has none. Raises `RecordError`."""
        found = record.get(_USUAL_KEY) if self.key is None else value_at(record, self.key, _SETTING)
        if found is None and self.key is None:
            return None
        name = self.key or _USUAL_KEY
        if not isinstance(found, int | float) or isinstance(found, bool):
            raise RecordError(f"{name} is {kind_of(found)}, expected a number; to use another key, set {_SETTING}")
        if not abs(found) <= LARGEST:
            raise RecordError(f"{name} is {shortened(str(found))}, expected a number from {-LARGEST} to {LARGEST}")
        return float(found)

    def columns(self, path: str, names: Sequence[str]) -> list[str]:
        """Return the column of a table that holds margins. Raises `DataError` if the set key is missing."""
        return [_USUAL_KEY] if self.key is None else columns_of(path, names, {_SETTING: self.key})
